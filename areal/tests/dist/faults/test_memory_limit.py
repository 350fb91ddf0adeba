"""A pass that by measured bytes per token does not fit into a rank's memory is refused on all ranks before it runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from areal.api import Batch, MicroBatchSpec, TokenOutputs, TrainEngine
from areal.tests.dist.faults.lost import raised
from areal.tests.grid.models import VOCAB
from areal.tests.harness.tiny import chosen, started
from areal.tests.harness.world import world
from areal.utils import platform
from areal.utils.profiling import host_memory
from areal.utils.profiling.pass_bytes import PassBytes

SIZES = (400, 400, 1200)
"""Tokens of passes: the first is not measured, and two of different sizes are."""

LONG = 400_000
"""Tokens of a sample that needs gigabytes."""

ROOM_MB = 700
"""MiB above those in use when an engine is made: more than the model and the passes of :data:`SIZES` need."""


def batch(engine: TrainEngine, n: int) -> list[dict[str, torch.Tensor]]:
    """Return one sample, another one on each data-parallel rank."""
    return [{"input_ids": (torch.arange(n) * 7 + engine.dp_rank) % (VOCAB - 3) + 3}]


def loss(out: TokenOutputs, mb: Batch) -> torch.Tensor:
    assert out.logprobs is not None
    return -out.logprobs.sum()


def limited(backend: str, limit_mb: int | None) -> Any:
    return started(backend, memory_limit_mb=limit_mb, mb_spec=MicroBatchSpec())


def limit() -> int:
    """Return a limit with some room, in MiB."""
    host_memory.trim()
    return platform.used_bytes(torch.device("cpu")) // 2**20 + ROOM_MB


def train(engine: TrainEngine, *sizes: int) -> list[float | None]:
    return [engine.train_batch(batch(engine, n), loss).loss for n in sizes]


def runs(call: Callable[[], Any]) -> bool:
    """Return whether a call is not refused."""
    try:
        call()
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("backend", chosen("fsdp:d1", "megatron:d1", "fsdp:d2", "fsdp:p2"))
def test_pass_that_does_not_fit_is_refused(backend: str) -> None:
    """On the last rank alone. All ranks raise the same error, and train on as if nothing had happened."""
    with limited(backend, None) as engine:
        expected = train(engine, *SIZES, 500)
    with limited(backend, limit()) as engine:
        losses = train(engine, *SIZES)
        last = engine.dp_rank == engine.dp_size - 1
        long = batch(engine, LONG if last else 300)
        for verb in (engine.train_batch, engine.forward_backward):
            with mock.patch.object(engine, "_run_schedule", side_effect=RuntimeError("the pass has begun")):
                text = raised(functools.partial(verb, long, loss), ValueError)
            for words in (f"{LONG} tokens, the longest sequence having {LONG}", "KiB per token", "Nothing has run"):
                assert words in text
            assert engine.dp_size == 1 or f"memory is short on rank {world().size - 1} " in text
        assert losses + train(engine, 500) == expected


@pytest.mark.parametrize("backend", chosen("fsdp:d1"))
def test_free_memory_is_the_limit_and_kinds_are_apart(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with limited(backend, 0) as engine:
        train(engine, *SIZES)
        monkeypatch.setattr(host_memory, "available_bytes", lambda: 2**20)
        train(engine, max(SIZES))  # not larger than what has run
        # Nothing is known of passes without gradients.
        assert runs(lambda: engine.eval_batch(batch(engine, 1500), loss))
        assert runs(lambda: engine.forward_batch(batch(engine, 1500)))
        text = raised(lambda: train(engine, 4000), ValueError)
        assert "memory is short on rank 0" in text
        assert "memory_limit_mb = 0" in text
        monkeypatch.undo()
        train(engine, 4000)


def test_bytes_of_a_pass_by_those_that_were_measured() -> None:
    nbytes = PassBytes()
    assert nbytes.due(1)
    assert (nbytes.reach(8), nbytes.needed(100)) == (0, 0)
    nbytes.add(100, 1000)
    # One pass: in proportion to tokens.
    assert (nbytes.reach(8), nbytes.needed(50), nbytes.needed(300)) == (800, 500, 3000)
    assert [nbytes.due(n) for n in (60, 70, 150, 151)] == [True, False, False, True]
    nbytes.add(300, 2000)
    # Two passes: their line above the larger one.
    assert nbytes.needed(500) == 3000
    assert nbytes.reach(8) > 10**9
    assert not nbytes.due(100)
    nbytes.add(600, 1500)
    assert nbytes.needed(1200) == 1500, "noise is no slope"
