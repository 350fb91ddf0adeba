"""SkyRL's Tinker server trains on the engines of this library: ``python -m areal.integrations.skyrl``."""

import skyrl

from areal.integrations.releases import warn_untested

TESTED = ("0.3.0", "0.3.0")
"""First and last release of SkyRL that the tests have run with."""

warn_untested("SkyRL", skyrl.__version__, __name__, TESTED)
