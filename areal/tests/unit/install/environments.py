"""Environments with the dependencies of the running interpreter, and without its installation of areal."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path

import areal

ROOT = Path(areal.__file__).parents[1]


FILES = (
    "areal/__init__.py",
    "areal/api/__init__.py",
    "areal/api/cli_args.py",
    "areal/engine/__init__.py",
    "areal/engine/fsdp_engine.py",
    "areal/infra/__init__.py",
    "areal/utils/data.py",
    "areal/version.py",
)
"""Files of AReaL 1.0.4's wheel. Three of them have the name of a file of this package."""


def copy_package(folder: Path) -> Path:
    """Copy the package without its tests into ``folder``, which has no metadata. Returns the copy."""
    ignored = shutil.ignore_patterns("tests", "__pycache__")
    return Path(shutil.copytree(ROOT / "areal", folder / "areal", ignore=ignored))


def link_dependencies(folder: Path, without: Sequence[str] = ()) -> Path:
    """Fill ``folder`` with links to all installed packages except areal, its metadata, and those ``without``."""
    folder.mkdir(parents=True)
    left_out = ("areal", "__editable__", *without)
    for site in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for entry in os.scandir(site):
            if not entry.name.startswith(left_out) and not entry.name.endswith(".pth"):
                (folder / entry.name).symlink_to(entry.path)
    return folder


def make_environment(folder: Path) -> Path:
    """Make a virtual environment without packages, not even pip. Returns its interpreter."""
    venv.create(folder, symlinks=True, with_pip=False)
    return folder / "bin" / "python"


def run_isolated(
    command: Sequence[str | Path], cwd: Path, *, timeout: float = 120.0, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command in another folder, without Python's variables and without a network for models."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**kept, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def install_other(site: Path, *, over: bool) -> None:
    """Write the other project's files as pip leaves them.

    Args:
        site: folder to install into.
        over: replace files that exist, as the later of two installations does.
    """
    for name in FILES:
        path = site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if over or not path.exists():
            path.write_text("")
    info = site / "areal-1.0.4.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.3\nName: areal\nVersion: 1.0.4\n")
    lines = [f"{name},sha256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU,0" for name in FILES]
    (info / "RECORD").write_text("\n".join([*lines, "areal-1.0.4.dist-info/RECORD,,"]) + "\n")
