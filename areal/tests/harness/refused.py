"""Tests of what an old release of another package cannot do: the refusal by name is their outcome there, a skip."""

from __future__ import annotations

import re

import pytest

from areal.utils.releases import installed_release

NEEDS_RESET = pytest.mark.skipif(installed_release("torch") < (2, 13), reason="torch cannot reset FSDP before 2.13")
"""Marks tests of an engine on one rank that goes on after an error of the model."""

_NOT_IN_PEFT = re.compile(r"cannot import name '(\w+)' from 'peft\.")
"""Transformers 5.6 allows peft 0.18.0, and loads no adapter with it."""

_REFUSAL = re.compile(r"([^\n:]*?):? needs (torch|transformers) (\d+)\.(\d+) or newer, installed is")


def refused_by_old_release(text: str) -> str | None:
    """Return the refusal in the text of a failure, if the installed release really is older; else ``None``."""
    lacking = _NOT_IN_PEFT.search(text)
    if lacking is not None and installed_release("peft") < (0, 19):
        return f"transformers needs a newer peft, with {lacking[1]}"
    found = _REFUSAL.search(text)
    if found is None or installed_release(found[2]) >= (int(found[3]), int(found[4])):
        return None
    return f"{found[1].strip()}: needs {found[2]} {found[3]}.{found[4]}"
