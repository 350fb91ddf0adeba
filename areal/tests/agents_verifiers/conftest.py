"""The taskset of the tests, and the table of the tests of agents."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from areal.tests.agents.conftest import pytest_terminal_summary, report

__all__ = ["pytest_terminal_summary", "report"]

PLUGINS = Path(__file__).parent / "plugins"


@pytest.fixture(autouse=True)
def plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the taskset for this process and for tool servers, and put uv, with which verifiers installs harnesses, on the path."""
    monkeypatch.syspath_prepend(str(PLUGINS))
    monkeypatch.setenv("PYTHONPATH", str(PLUGINS), prepend=os.pathsep)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    assert shutil.which("uv"), "verifiers installs the programs of harnesses with uv: pip install uv"
