"""Marks of tests that need one release of transformers: ``make test-skyrl`` runs with two."""

from __future__ import annotations

from importlib.metadata import version

import pytest
from packaging.version import Version

_OLD = Version(version("transformers")) < Version("5.19")

SAMPLES = pytest.mark.skipif(
    _OLD, reason="LocalRollout needs transformers 5.19, which SkyRL does not allow: the second run of make test-skyrl"
)
PINNED = pytest.mark.skipif(
    not _OLD, reason="needs a transformers that SkyRL allows, which does not sample: the first run of make test-skyrl"
)
