"""The Dockerfile copies files that exist, and installs extras that exist. The image itself is not built here."""

from __future__ import annotations

import fnmatch
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[4]
LINES = (ROOT / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
IGNORED = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def arguments(instruction: str) -> list[str]:
    """Return the arguments of each line with an instruction."""
    return [line.removeprefix(instruction).strip() for line in LINES if line.startswith(f"{instruction} ")]


def is_sent(name: str) -> bool:
    """Return whether a file is sent to the build: the last pattern of ``.dockerignore`` that fits decides."""
    sent = True
    for pattern in IGNORED:
        if fnmatch.fnmatch(name, pattern.removeprefix("!")):
            sent = pattern.startswith("!")
    return sent


def copied() -> list[str]:
    return [source for line in arguments("COPY") for source in line.split()[:-1]]


def test_copied_files_exist_and_are_sent_to_the_build() -> None:
    assert "areal" in copied()
    assert not [name for name in copied() if not (ROOT / name).exists()]
    assert not [name for name in copied() if not is_sent(name)]
    assert not is_sent("areal/tests")
    assert not is_sent("runs")


def test_build_has_the_files_that_pyproject_names() -> None:
    project = PROJECT["project"]
    assert {"pyproject.toml", project["readme"], *project["license-files"]} <= set(copied())


def test_installed_extras_exist() -> None:
    (install,) = [
        re.search(r"pip install .*'\.\[([\w,]+)\]'", line) for line in arguments("RUN") if "pip install" in line
    ]
    assert install is not None
    extras = install[1].split(",")
    assert {"recipes", "trackers"} <= set(extras) <= set(PROJECT["project"]["optional-dependencies"])


def test_python_of_the_image_is_supported() -> None:
    (base,) = arguments("FROM")
    release = re.fullmatch(r"python:(\d\.\d+)-slim", base)
    assert release is not None
    assert f"Programming Language :: Python :: {release[1]}" in PROJECT["project"]["classifiers"]


def test_image_runs_the_command_as_an_ordinary_user() -> None:
    assert arguments("ENTRYPOINT") == ['["areal"]']
    assert "areal" in PROJECT["project"]["scripts"]
    assert arguments("USER") == ["areal"]
