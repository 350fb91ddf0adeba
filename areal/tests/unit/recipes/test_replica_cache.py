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
from areal.recipes.generation import context, rollouts
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


def replica_options(config: GRPOConfig, ranks: int, max_context: int | None, of_model: int) -> dict[str, Any]:
    """Return the options of the replica that the settings make for a model of such a context."""
    engine: Any = SimpleNamespace(
        dp_size=ranks, device="cpu", config=SimpleNamespace(dtype="float32", fsdp=FSDPConfig())
    )
    with (
        mock.patch.multiple(rollouts, read_config=mock.DEFAULT, model_factory=mock.DEFAULT),
        mock.patch.object(context, "model_context", return_value=of_model),
        mock.patch.object(inference, "LocalRollout", create=True) as made,
        ExitStack() as closing,
    ):
        rollouts.make_rollout(config, engine, max_context, closing)
    options: dict[str, Any] = made.call_args.kwargs
    return options


@pytest.mark.parametrize("case", CACHES)
def test_cache_has_room_for_the_answers_of_a_rank(case: str, tmp_path: Path) -> None:
    changes, ranks, expected = CACHES[case]
    config = GRPOConfig(model="m", output=tmp_path, groups=8, group_size=4, **changes)
    options = replica_options(config, ranks, 1000, of_model=2000)
    assert options["cache_tokens"] == expected
    assert options["max_context"] == 1000
    assert {**options, **changes.get("rollout", {})} == options


@pytest.mark.parametrize(
    ("of_model", "chosen", "max_context", "cache"),
    [
        pytest.param(131072, {}, 32768, 32768, id="long context"),
        pytest.param(4096, {}, 4096, 32768, id="short context"),
        pytest.param(256, {}, 256, 32 * 256, id="tiny model"),
        pytest.param(131072, {"max_context": 20000}, 20000, 32 * 20000, id="chosen context"),
        pytest.param(131072, {"page_size": 100}, 32768, 32800, id="pages"),
    ],
)
def test_cache_of_episodes_of_unknown_length_is_bounded(
    of_model: int, chosen: dict[str, int], max_context: int, cache: int, tmp_path: Path
) -> None:
    config = GRPOConfig(model="m", output=tmp_path, groups=8, group_size=4, rollout=chosen)
    options = replica_options(config, 1, None, of_model)
    assert (options["max_context"], options["cache_tokens"]) == (max_context, cache)
