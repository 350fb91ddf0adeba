"""A griffe extension that renders Sphinx roles of docstrings (``:class:`Name```) as links of the API reference."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:py:)?(?:class|func|meth|attr|data|mod|exc|obj|const):`~?([\w.]+)`")


def rewrite(text: str, scope: griffe.Object | None = None) -> str:
    """Return a docstring with its roles as cross references, or as code where the name does not resolve.

    Args:
        text: a docstring.
        scope: the documented object, in whose scope names are looked up.
    """

    def link(role: re.Match[str]) -> str:
        path = resolved(role[1], scope)
        code = f"<code>{role[1]}</code>"
        # Optional: many names are not in the reference, and are then shown as code.
        return f'<autoref identifier="{path}" optional>{code}</autoref>' if path else code

    return ROLE.sub(link, text)


def resolved(name: str, scope: griffe.Object | None) -> str | None:
    """Return the full path of a name, or None where it is not known."""
    if name.startswith("areal."):
        return name
    if scope is None:
        return None
    try:
        return scope.resolve(name)
    except griffe.NameResolutionError:
        return None


class Roles(griffe.Extension):
    """Rewrites every docstring of a package once the package is loaded."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: Any) -> None:
        """Visit the package's own objects; aliases lead to objects that are visited where they are defined."""
        pending: list[griffe.Object] = [pkg]
        while pending:
            scope = pending.pop()
            if scope.docstring is not None:
                scope.docstring.value = rewrite(scope.docstring.value, scope)
            pending.extend(member for member in scope.members.values() if isinstance(member, griffe.Object))
