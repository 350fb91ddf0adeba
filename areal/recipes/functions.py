"""Functions of users by name: ``module:function`` or ``file.py:function``."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any


def load_function(name: str) -> Callable[..., Any]:
    """Import a function. Modules are also searched in the working directory.

    Args:
        name: ``module:function`` or ``path/to/file.py:function``.

    Raises:
        ValueError: the name is of another form, the file or module does not exist, or has no such function.
        Exception: what the module raised on import.
    """
    where, colon, attribute = name.rpartition(":")
    if not colon or not where or not attribute:
        raise ValueError(f"{name!r}: expected 'module:function' or 'path/to/file.py:function'")
    module = _from_file(name, Path(where)) if where.endswith(".py") else _from_module(name, where)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{name!r}: {where} has no {part!r}{did_you_mean(part, dir(found))}")
        found = getattr(found, part)
    if not callable(found):
        raise ValueError(f"{name!r} is a {type(found).__name__}, and not a function")
    return found


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of a message that names what was probably meant; empty if nothing is near."""
    near = get_close_matches(name, list(known), n=1)
    return f": did you mean {near[0]!r}?" if near else ""


def function_name(function: Callable[..., Any]) -> str | None:
    """Return the name by which :func:`load_function` finds a function; ``None`` if it has none, as a lambda or an object."""
    module, attribute = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if module is None or attribute is None or "<" in attribute:
        return None
    if module != "__main__":
        return f"{module}:{attribute}"
    file = inspect.getsourcefile(function)
    return None if file is None else f"{file}:{attribute}"


def _from_file(name: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"{name!r}: there is no file {path}")
    # One module per file, also if several functions of it are named.
    key = f"areal_user_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]}"
    if key not in sys.modules:
        spec = importlib.util.spec_from_file_location(key, path)
        if spec is None or spec.loader is None:
            raise ValueError(f"{name!r}: {path} is no module of Python")
        module = importlib.util.module_from_spec(spec)
        sys.modules[key] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[key]
            raise
    return sys.modules[key]


def _from_module(name: str, module: str) -> ModuleType:
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not (module == error.name or module.startswith(f"{error.name}.")):
            raise
        raise ValueError(f"{name!r}: there is no module {error.name!r}, also not in {here}") from None
