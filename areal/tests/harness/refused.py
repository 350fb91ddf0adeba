"""Tests of what an old release of another package cannot do: the refusal by name is their outcome there, a skip."""

from __future__ import annotations

import re

from areal.utils.releases import installed_release

_REFUSAL = re.compile(r"([^\n:]*?):? needs (torch|transformers) (\d+)\.(\d+) or newer, installed is")


def refused_by_old_release(text: str) -> str | None:
    """Return the refusal in the text of a failure, if the installed release really is older; else ``None``."""
    found = _REFUSAL.search(text)
    if found is None or installed_release(found[2]) >= (int(found[3]), int(found[4])):
        return None
    return f"{found[1].strip()}: needs {found[2]} {found[3]}.{found[4]}"
