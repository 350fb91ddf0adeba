"""SkyRL's Tinker server trains on the engines of this library: ``python -m areal.integrations.skyrl``."""

from __future__ import annotations

import warnings

import skyrl
from packaging.version import Version

TESTED = ("0.3.0", "0.3.0")
"""First and last release of SkyRL that the tests have run with."""

if not Version(TESTED[0]) <= Version(skyrl.__version__) <= Version(TESTED[1]):
    warnings.warn(
        f"SkyRL {skyrl.__version__}: areal.integrations.skyrl was tested with {' to '.join(dict.fromkeys(TESTED))}",
        stacklevel=2,
    )
