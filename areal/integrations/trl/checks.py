"""Checks of TRL's release and options."""

import warnings
from collections.abc import Sequence
from typing import Any

import trl

from areal.integrations.releases import is_tested

TESTED = ("1.16.0", "1.16.0")
"""Oldest and newest release of TRL that the tests ran with."""


def check(
    args: Any, unsupported: Sequence[str], rules: dict[str, tuple[bool, str]], release: str = trl.__version__
) -> None:
    """Warn of an untested release of TRL, and raise a ``ValueError`` for an option of ``args``.

    ``unsupported`` names options that must have their defaults; ``rules`` has, by name, if a value is supported, and the way out.
    """
    if not is_tested(release, TESTED):
        warnings.warn(f"trl = {release}: areal.integrations.trl was tested with {' to '.join(TESTED)}", stacklevel=3)
    defaults = {name: type(args).__dataclass_fields__[name].default for name in unsupported}
    plain = {
        name: (getattr(args, name) == x, f"it is not supported; leave it at {x!r}") for name, x in defaults.items()
    }
    for name, (fits, way_out) in (plain | rules).items():
        if not fits:
            raise ValueError(f"{type(args).__name__}.{name} = {getattr(args, name)!r}: {way_out}")
