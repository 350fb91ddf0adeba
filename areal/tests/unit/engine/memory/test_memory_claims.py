"""What a rank tells the others of its memory before a pass."""

from __future__ import annotations

import pytest
import torch

from areal.api.memory import EngineMemory, KindMemory
from areal.engine.memory_limit import MemoryLimit
from areal.utils import platform

MIB = 2**20


@pytest.mark.parametrize("limit_mb", [0, 1000])
@pytest.mark.parametrize(("forward_only", "returning"), [(True, 100), (False, 130)])
def test_what_comes_back_before_a_pass_is_not_free(
    forward_only: bool, returning: int, limit_mb: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters, and gradients where the pass adds to them; no optimizer state."""
    monkeypatch.setattr(platform, "free_memory", lambda device: 800 * MIB)
    monkeypatch.setattr(platform, "used_bytes", lambda device: 300 * MIB)
    held = EngineMemory(*(KindMemory(offloaded=n * MIB) for n in (100, 30, 500)))
    limit = MemoryLimit(torch.device("cpu"), limit_mb, lambda: [held])
    kind = (forward_only, "logprobs")
    assert limit.claim(kind, 64, always=False) is None
    with limit.measuring(kind, 64):
        pass
    free = min(800, limit_mb - 300 if limit_mb else 800)
    claim = limit.claim(kind, 65, always=False)
    assert claim is not None
    assert claim.free == (free - returning) * MIB
    # With fsdp.cpu_offload, nothing comes back.
    limit._memory = None
    claim = limit.claim(kind, 65, always=False)
    assert claim is not None
    assert claim.free == free * MIB
