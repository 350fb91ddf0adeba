"""The cache of keys and values of a replica: as large as the answers of a rank at once."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from areal import inference
from areal.api import FSDPConfig
from areal.recipes.generation import rollouts
from areal.recipes.policy_config import GRPOConfig

CACHES: dict[str, tuple[dict[str, Any], int, int]] = {
    "32 answers": ({}, 1, 32 * 1008),
    "two ranks": ({}, 2, 16 * 1008),
    "three ranks": ({}, 3, 12 * 1008),
    "staleness": ({"max_staleness": 3}, 1, 64 * 1008),
    "pages": ({"rollout": {"page_size": 64}}, 1, 32 * 1024),
    "fewer requests": ({"rollout": {"max_requests": 10}}, 1, 10 * 1008),
    "chosen": ({"rollout": {"cache_tokens": 2000}}, 1, 2000),
}


@pytest.mark.parametrize("case", CACHES)
def test_cache_has_room_for_the_answers_of_a_rank(case: str, tmp_path: Path) -> None:
    changes, ranks, expected = CACHES[case]
    config = GRPOConfig(model="m", output=tmp_path, groups=8, group_size=4, **changes)
    engine: Any = SimpleNamespace(
        dp_size=ranks, device="cpu", config=SimpleNamespace(dtype="float32", fsdp=FSDPConfig())
    )
    with (
        mock.patch.multiple(rollouts, read_config=mock.DEFAULT, model_factory=mock.DEFAULT),
        mock.patch.object(inference, "LocalRollout", create=True) as made,
        ExitStack() as closing,
    ):
        rollouts.make_rollout(config, engine, 1000, closing)
    options = made.call_args.kwargs
    assert options["cache_tokens"] == expected
    assert options["max_context"] == 1000
    assert {**options, **changes.get("rollout", {})} == options
