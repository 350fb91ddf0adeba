"""Releases of other frameworks that the adapters were tested with."""

from __future__ import annotations

import warnings

from packaging.version import Version


def is_tested(release: str, tested: tuple[str, str]) -> bool:
    """Return whether a release lies between the oldest and the newest tested one."""
    oldest, newest = map(Version, tested)
    return oldest <= Version(release) <= newest


def warn_untested(framework: str, release: str, adapter: str, tested: tuple[str, str]) -> None:
    """Warn if a release was not tested.

    Args:
        framework: name, for the message.
        release: installed release.
        adapter: module of the adapter.
        tested: oldest and newest tested release.
    """
    if not is_tested(release, tested):
        between = " to ".join(dict.fromkeys(tested))
        warnings.warn(f"{framework} {release}: {adapter} was tested with {between}", stacklevel=3)
