"""A griffe extension that prepares docstrings for the API reference.

Sphinx roles (``:class:`Name```) become links. Fields of pydantic models are documented by the ``description`` of their
``Field``.
"""

from __future__ import annotations

import ast
import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:py:)?(?:class|func|meth|attr|data|mod|exc|obj|const):`~?([\w.]+)`")


def rewrite_roles(text: str, scope: griffe.Object | None = None) -> str:
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


def field_parts(value: str) -> tuple[str | None, str | None]:
    """Return the default and the description of a pydantic field, each as text.

    Args:
        value: the source of the assigned value, such as ``Field(default=1, description="…")``.
    """
    call = ast.parse(value, mode="eval").body
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "Field"):
        return value, None
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    default, description = keywords.get("default"), keywords.get("description")
    shown = None if default is None else ast.unparse(default)
    return shown, ast.literal_eval(description) if description is not None else None


class Docstrings(griffe.Extension):
    """Rewrites every docstring of a package once the package is loaded."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: Any) -> None:
        """Visit the package's own objects; aliases lead to objects that are visited where they are defined."""
        pending: list[griffe.Object] = [pkg]
        while pending:
            scope = pending.pop()
            if isinstance(scope, griffe.Attribute):
                document_field(scope)
            if scope.docstring is not None:
                scope.docstring.value = rewrite_roles(scope.docstring.value, scope)
            pending.extend(member for member in scope.members.values() if isinstance(member, griffe.Object))


def document_field(attribute: griffe.Attribute) -> None:
    """Give an attribute that is assigned a pydantic ``Field`` its description and its default."""
    source = str(attribute.value)
    if attribute.docstring is not None or not source.startswith("Field("):
        return
    default, description = field_parts(source)
    attribute.value = default
    if description is not None:
        attribute.docstring = griffe.Docstring(description, parent=attribute)
