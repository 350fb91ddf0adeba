"""Installed packages against the requirements in the metadata of areal, and against the newest tested releases."""

from __future__ import annotations

import platform
import sys
from importlib import metadata

from packaging.requirements import Requirement
from packaging.version import Version

from areal.cli.doctor.findings import Finding, State
from areal.entry_points import OWN_DISTRIBUTION
from areal.name_clash import other_metadata

NEWEST_TESTED = {
    "python": "3.13",
    "torch": "2.15",
    "transformers": "5.23",
    "peft": "0.21",
    "megatron-core": "0.16.1",
    "jax": "0.10",
    "ray": "2.60",
}
"""Newest release of each package that the tests have run with. Later ones may work."""

OLDEST_PYTHON = "3.11"

FOR_DEVELOPMENT = ("demo", "dev", "docs", "test")
"""Extras for work on this package, which users do not need."""


def own_distribution() -> metadata.Distribution | None:
    """Return the metadata of this package, or ``None`` for a copy without metadata."""
    # The other project with this name may come before or after it on the path.
    others = set(other_metadata(sys.path))
    found = metadata.distributions(name=OWN_DISTRIBUTION)
    return next((one for one in found if str(getattr(one, "_path", "")) not in others), None)


def own_requirements(distribution: metadata.Distribution) -> list[Requirement]:
    """Return the requirements of a distribution, with those of its extras."""
    return [Requirement(line) for line in distribution.requires or ()]


def installed_version(package: str) -> str | None:
    """Return the version of an installed package, or ``None``."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def check_python(version: str | None = None) -> Finding:
    """Compare the version of the interpreter, or ``version``, with the tested ones."""
    found = version or platform.python_version()
    tested = f"tested: {OLDEST_PYTHON} to {NEWEST_TESTED['python']}"
    if Version(found) < Version(OLDEST_PYTHON):
        return Finding("Python", State.FAULT, f"{found}: too old ({tested}); make an environment with a newer one")
    return _rate("Python", found, tested, NEWEST_TESTED["python"])


def check_packages(requirements: list[Requirement] | None) -> list[Finding]:
    """Compare installed packages with the requirements, or without metadata with the newest tested releases only."""
    if requirements is None:
        versions = {name: installed_version(name) for name in NEWEST_TESTED if name != "python"}
        return [
            _rate(name, found, f"tested: up to {NEWEST_TESTED[name]}", NEWEST_TESTED[name])
            for name, found in versions.items()
            if found is not None
        ]
    findings = []
    seen: set[str] = set()
    for requirement in sorted(requirements, key=lambda one: one.marker is not None):
        base, found = _is_base(requirement), installed_version(requirement.name)
        if requirement.name in seen or requirement.name == OWN_DISTRIBUTION or not (base or found):
            continue
        if base or (requirement.name in NEWEST_TESTED and _extra(requirement) not in FOR_DEVELOPMENT):
            seen.add(requirement.name)
            findings.append(_check(requirement, found))
    return findings


def check_extras(requirements: list[Requirement]) -> list[Finding]:
    """Return for each extra whether it is installed, or the command that installs it."""
    extras: dict[str, list[str]] = {}
    for requirement in requirements:
        extra = _extra(requirement)
        if extra is None or extra in FOR_DEVELOPMENT:
            continue
        missing = extras.setdefault(extra, [])
        if not requirement.marker or requirement.marker.evaluate({"extra": extra}):
            found = installed_version(requirement.name)
            if found is None or not requirement.specifier.contains(found, prereleases=True):
                missing.append(f"{requirement.name}{requirement.specifier}")
    return [
        Finding(extra, State.ABSENT, f"pip install 'areal[{extra}]'  (missing: {', '.join(missing)})")
        if missing
        else Finding(extra, State.FINE, "installed")
        for extra, missing in sorted(extras.items())
    ]


def _check(requirement: Requirement, found: str | None) -> Finding:
    extra = _extra(requirement)
    wanted = f"requires {requirement.specifier}" if requirement.specifier else "any version"
    install = f"pip install '{OWN_DISTRIBUTION if extra is None else f'{OWN_DISTRIBUTION}[{extra}]'}'"
    if found is None:
        return Finding(requirement.name, State.FAULT, f"not installed ({wanted}): {install}")
    if not requirement.specifier.contains(found, prereleases=True):
        # A package of an extra may be there for other programs.
        state = State.FAULT if extra is None else State.NOTE
        return Finding(requirement.name, state, f"{found}: {wanted}: {install}")
    newest = NEWEST_TESTED.get(requirement.name)
    return _rate(requirement.name, found, wanted + (f", tested: up to {newest}" if newest else ""), newest)


def _rate(name: str, found: str, about: str, newest: str | None) -> Finding:
    """Return whether a version is newer than the newest tested one, of which patch releases count as tested."""
    if newest is not None and Version(found).release[: len(Version(newest).release)] > Version(newest).release:
        return Finding(name, State.NOTE, f"{found} ({about}): newer than the tests have seen")
    return Finding(name, State.FINE, f"{found} ({about})")


def _extra(requirement: Requirement) -> str | None:
    """Return the extra that a requirement belongs to, or ``None`` for one of the package itself."""
    text = str(requirement.marker or "")
    return text.rpartition('extra == "')[2].partition('"')[0] if 'extra == "' in text else None


def _is_base(requirement: Requirement) -> bool:
    return _extra(requirement) is None and (requirement.marker is None or requirement.marker.evaluate())
