"""Reductions and gathers that overlap with computation give the same bits, and an engine that can be used after an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from areal.api import ParallelDims
from areal.tests.dist.faults.twins import DISCARDED, explode, raised, twins
from areal.tests.grid.models import model_dir
from areal.tests.harness.tiny import global_batch, local_batch, loss, started

DEEP = {"num_hidden_layers": 4}
REDUCE = {"overlap_grad_reduce": True}
GATHER = {**REDUCE, "overlap_param_gather": True}
BUCKETS = {"bucket_size": 3000}


def run(backend: str, family: str, dtype: str, settings: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Train in the ways of a custom loop, and return the numbers of the steps and the weights."""
    with started(backend, path=model_dir(family, **DEEP), dtype=dtype, megatron=settings) as engine:
        numbers: list[float] = []
        for seed in range(4):
            batch = local_batch(engine, global_batch(seed))
            if seed == 2:
                for _ in range(2):
                    engine.forward_backward(batch, loss)
                # Reduces the gradients. Reading the weights afterwards must not hide the update from the next reading.
                numbers += [gradient.double().sum().item() for _, gradient in engine.named_gradients()]
                numbers += [engine.eval_batch(batch, loss).loss]
                step = engine.optimizer_step()
                numbers += [step.grad_norm, engine.eval_batch(batch, loss).loss]
            else:
                step = engine.train_batch(batch, loss)
                numbers += [step.loss, step.grad_norm]
        return numbers, {name: tensor.clone() for name, tensor in engine.named_tensors()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("backend", "family"),
    [
        pytest.param(backend, family, marks=pytest.mark.world(ParallelDims.parse(backend).world_size))
        for backend, family in (
            ("megatron:d2", "qwen3"),
            ("megatron:c2", "qwen3_tied"),
            ("megatron:e2", "qwen3_moe"),
            ("megatron:d4", "qwen3"),
            ("megatron:d2t2", "qwen3"),
            ("megatron:d2p2", "qwen3_tied"),
            ("megatron:d2p2v2", "qwen3"),
        )
    ],
)
def test_overlap_changes_no_bit(backend: str, family: str, dtype: str) -> None:
    numbers, weights = run(backend, family, dtype, {"overlap_grad_reduce": False})
    # The order in which four gradients are added depends on their position in a bucket.
    buckets = {} if backend == "megatron:d4" else BUCKETS
    for settings in (REDUCE, GATHER):
        overlapped, same = run(backend, family, dtype, {**settings, **buckets})
        assert overlapped == pytest.approx(numbers, rel=1e-12)
        assert same.keys() == weights.keys()
        assert not [name for name, tensor in weights.items() if not torch.equal(same[name], tensor)]


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param(backend, marks=pytest.mark.world(ParallelDims.parse(backend).world_size))
        for backend in (
            "megatron:d2",
            "megatron:c2",
            "megatron:e2",
            "megatron:d2t2",
            "megatron:d2p2",
            "megatron:d2p2v2",
        )
    ],
)
@pytest.mark.parametrize("settings", [REDUCE, GATHER], ids=["reduce", "gather"])
def test_engine_works_after_a_loss_fails_on_one_rank(backend: str, settings: dict[str, Any]) -> None:
    """In the first step, from which Megatron learns its buckets, and in a later one, whose reductions have begun by then."""
    path = model_dir("qwen3_moe" if backend == "megatron:e2" else "qwen3", **DEEP)
    with twins(backend, path=path, megatron={**settings, **BUCKETS}, mb_spec={"n_mbs": 2}) as pair:
        for verb in (pair.engine.train_batch, pair.engine.train_batch, pair.engine.forward_backward):
            for _ in range(2):
                with raised(RuntimeError, "no such column", DISCARDED, guilty=pair.guilty):
                    verb(pair.batch(), explode if pair.is_guilty else loss)
            pair.check()
        pair.check_weights()
