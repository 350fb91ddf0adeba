"""Set-up by `make`: interpreters that cannot be used, interrupted set-ups, no network, no compiler; and the second try."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import venv
from functools import partial
from pathlib import Path

import pytest

from areal.tests.unit.install.environments import ROOT

TOO_OLD = """#!/bin/sh
exec {python} -c 'import sys; sys.version_info = (3, 9, 18, "final", 0); exec(sys.argv[2])' "$@"
"""

WITHOUT_PIP = """#!/bin/sh
if [ "$1 $2" = "-m venv" ]; then shift 2; set -- -m venv --without-pip "$@"; fi
{python} "$@"
{then}
"""
"""A Python that makes environments in a fraction of a second, and then does something else."""

FAKE_PIP = """#!/bin/sh
if [ "$1 $2 $3" != "-m pip install" ]; then exec {python} "$@"; fi
if [ -e online ]; then exit 0; fi
exec {python} -m pip download --isolated --no-cache-dir --retries 0 --index-url http://127.0.0.1:9/simple $4 $5 areal-test
"""
"""The Python of an environment whose pip finds nothing at the package index until there is a file ``online``."""


def script(path: Path, text: str, **values: str) -> Path:
    path.write_text(text.format(python=sys.executable, **values))
    path.chmod(0o755)
    return path


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The files of a clone that set-up reads."""
    folder = tmp_path / "clone"
    (folder / ".ci").mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml", "constraints.txt", ".ci/venv", ".ci/pip", ".ci/without_compiler.py"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def make(clone: Path, target: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")} | variables
    return subprocess.run(
        ["make", target, *arguments],
        cwd=clone,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_python_that_cannot_be_used(clone: Path) -> None:
    """Nothing is made."""
    old = script(clone / "python3.9", TOO_OLD)
    broken = script(clone / "broken", "#!/bin/sh\nexit 127\n")
    for python, reason in (
        (str(old), "is Python 3.9, which is too old"),
        (str(broken), "does not run"),
        ("no-such-python", "there is no such program"),
    ):
        done = make(clone, "setup", f"PYTHON={python}")
        assert done.returncode != 0
        assert f"set-up: PYTHON={python}" in done.stderr
        assert reason in done.stderr
        assert "PYTHON=python3.12" in done.stderr
        assert not (clone / ".venv").exists()


def test_interrupted_environment_is_made_anew(clone: Path) -> None:
    slow = script(clone / "slow", WITHOUT_PIP, then='if [ "$2" = venv ]; then touch .venv/half; exec sleep 60; fi')
    # A session in the background of a shell ignores the signal, and so would what it starts.
    default = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    command = ["make", ".venv/.made", f"PYTHON={slow}"]
    process = subprocess.Popen(command, cwd=clone, start_new_session=True, preexec_fn=default)
    deadline = time.monotonic() + 60
    while not (clone / ".venv" / "half").exists():
        assert time.monotonic() < deadline, "no environment was started"
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(60) != 0
    assert (clone / ".venv" / "bin" / "python").exists()
    assert not (clone / ".venv" / ".made").exists()
    fast = script(clone / "fast", WITHOUT_PIP, then="")
    done = make(clone, ".venv/.made", f"PYTHON={fast}")
    assert done.returncode == 0, done.stderr
    assert (clone / ".venv" / ".made").exists()
    assert not (clone / ".venv" / "half").exists()
    assert not (clone / ".venv" / ".making").exists()


def test_environment_without_pip_is_completed(clone: Path) -> None:
    """As a set-up that was interrupted before there were marks has left it, or as uv makes it."""
    venv.create(clone / ".venv", symlinks=True, with_pip=False)
    (clone / ".venv" / "of-the-user").touch()
    done = make(clone, ".venv/.made")
    assert done.returncode == 0, done.stderr
    assert (clone / ".venv" / "of-the-user").exists()
    pip = subprocess.run([clone / ".venv/bin/python", "-m", "pip", "--version"], capture_output=True, check=False)
    assert pip.returncode == 0, pip.stderr


def test_environments_that_are_refused(clone: Path) -> None:
    """They may be of use to their owner: nothing is removed."""
    (clone / ".venv").mkdir()
    (clone / ".venv" / "notes").touch()
    done = make(clone, ".venv/.made")
    assert ".venv exists and is no virtual environment: remove or rename it" in done.stderr
    (clone / ".venv" / "bin").mkdir()
    script(clone / ".venv" / "bin" / "python", TOO_OLD)
    done = make(clone, ".venv/.made")
    assert ".venv is Python 3.9, which is too old: remove it (rm -rf .venv)" in done.stderr
    assert (clone / ".venv" / "notes").exists()


def test_python_that_is_gone_takes_its_stamps_along(clone: Path) -> None:
    (clone / ".venv" / "bin").mkdir(parents=True)
    (clone / ".venv" / "pyvenv.cfg").touch()
    (clone / ".venv" / "bin" / "python").symlink_to("/no/such/python")
    for stamp in (".made", ".test", ".demo", ".docs"):
        (clone / ".venv" / stamp).touch()
    fast = script(clone / "fast", WITHOUT_PIP, then="")
    done = make(clone, ".venv/.made", f"PYTHON={fast}")
    assert done.returncode == 0, done.stderr
    assert not (clone / ".venv" / ".test").exists()
    assert (clone / ".venv" / "bin" / "python").exists()


def test_without_network_the_second_try_goes_on(clone: Path) -> None:
    pytest.importorskip("pip")
    (clone / ".venv" / "bin").mkdir(parents=True)
    script(clone / ".venv" / "bin" / "python", FAKE_PIP)
    (clone / ".venv" / ".made").touch()
    done = make(clone, ".venv/.test")
    assert done.returncode != 0
    assert "set-up: no connection to the package index: could not fetch areal-test." in done.stderr
    assert "run the same make again" in done.stderr
    assert not (clone / ".venv" / ".test").exists()
    (clone / "online").touch()
    assert make(clone, ".venv/.test").returncode == 0
    assert (clone / ".venv" / ".test").exists()


def test_without_a_compiler(clone: Path) -> None:
    """What needs one is left out."""
    tools = clone / "tools"
    tools.mkdir()
    for name in ("bash", "mktemp", "sed", "grep", "sort", "head", "paste", "rm"):
        (tools / name).symlink_to(str(shutil.which(name)))
    text = '#!/bin/sh\nif [ "$1" = -m ]; then printf \'%s\\n\' "$@" >arguments; else exec {python} "$@"; fi\n'
    python = script(clone / "python", text)
    done = subprocess.run(
        [clone / ".ci" / "pip", python, "-e", ".[demo,test]"],
        cwd=clone,
        env={"PATH": str(tools)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "set-up: there is no C compiler (apt install gcc g++). reasoning-gym is left out" in done.stderr
    assert "fsdp.compile" in done.stderr
    _, _, _, _, _, editable, project, *requirements = (clone / "arguments").read_text().splitlines()
    assert (editable, project) == ("-e", ".")
    extras = tomllib.loads((clone / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    own = ("recipes", "tinker", "trackers")
    wanted = {line for name in ("demo", "test", *own) for line in extras[name]} - {
        f"areal[{','.join(own)}]",
        "areal[recipes]",
    }
    assert {line for line in wanted if "reasoning-gym" not in line} == set(requirements)
    assert len(requirements) > 10
