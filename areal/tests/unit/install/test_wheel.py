"""The sdist and the wheel that is built from it: their files, and the README's first program in an empty environment."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

import pytest

from areal.tests.unit.install.environments import ROOT, link_dependencies, make_environment, run_isolated

PROJECT = (
    "pyproject.toml",
    "MANIFEST.in",
    "README.md",
    "LICENSE",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "Makefile",
    "mkdocs.yml",
    "Dockerfile",
    ".dockerignore",
)
FOLDERS = (".ci", "areal", "benchmarks", "docs", "examples", "recipes", "tools")

PRINT_PACKAGE = "\nimport areal\n\nprint('package', areal.__file__)\n"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An sdist of this tree, and a wheel of the sdist, by the tools of the running environment."""
    folder = tmp_path_factory.mktemp("dist")
    # A build writes into the tree.
    source = folder / "source"
    source.mkdir()
    for name in (*PROJECT, *FOLDERS):
        subprocess.run(["cp", "-R", ROOT / name, source / name], check=True)
    command = [
        "uv",
        "build",
        "--offline",
        "--no-build-isolation",
        "--python",
        sys.executable,
        "--out-dir",
        folder,
        source,
    ]
    done = run_isolated([sys.executable, "-m", *command], folder)
    assert done.returncode == 0, done.stderr
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def tree(suffixes: tuple[str, ...] = ("",)) -> set[str]:
    """Return the files of the package in this tree, relative to its root."""
    return {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "areal").rglob("*")
        if path.is_file() and path.name.endswith(suffixes) and "__pycache__" not in path.parts
    }


def test_wheel_has_the_package_without_its_tests(built: tuple[Path, Path]) -> None:
    files = {name for name in zipfile.ZipFile(built[1]).namelist() if ".dist-info/" not in name}
    # Modules and data: py.typed, the pages and the protocol of the server, a section of verl's configuration.
    wanted = {
        name
        for name in tree((".py", ".pyi", ".html", ".proto", ".yaml", "py.typed"))
        if not name.startswith("areal/tests/")
    }
    assert {PurePosixPath(name).suffix for name in wanted} == {".py", ".pyi", ".html", ".proto", ".yaml", ".typed"}
    assert files == wanted


def test_sdist_has_the_tests_and_what_they_read(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
    assert tree() <= files
    assert {*PROJECT, ".ci/run", "docs/index.md", "examples/grpo.py", "benchmarks/__main__.py"} <= files


def test_first_program_of_the_readme_runs_with_the_wheel(built: tuple[Path, Path], tmp_path: Path) -> None:
    """In an environment that has the dependencies only, in another folder, as it is pasted."""
    python = make_environment(tmp_path / "environment")
    dependencies = link_dependencies(tmp_path / "dependencies")
    (site,) = (tmp_path / "environment").glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(f"{dependencies}\n")
    install = ["uv", "pip", "install", "--offline", "--no-deps", "--python", python, built[1]]
    installed = run_isolated([sys.executable, "-m", *install], tmp_path)
    assert installed.returncode == 0, installed.stderr
    found = re.search(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "program.py").write_text(found[1] + PRINT_PACKAGE)
    done = run_isolated([python, "program.py"], elsewhere)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"package {site / 'areal' / '__init__.py'}"
    # The console script of the wheel.
    listed = run_isolated([python.with_name("areal"), "--help"], elsewhere)
    assert "doctor" in listed.stdout, listed.stderr
