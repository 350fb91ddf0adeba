"""Overlapped reductions begin in one order on all ranks, whatever their losses reach, and in a communicator that no layer uses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from areal.api import Batch, TokenOutputs, TrainEngine
from areal.engine import base
from areal.tests.dist.faults.twins import DISCARDED, explode, raised
from areal.tests.dist.megatron.begun import begun_reductions
from areal.tests.grid.models import model_dir
from areal.tests.harness.tiny import global_batch, layout, loss, started, uneven_batch

BUCKETS = {"bucket_size": 3000}
RETURNS = ("logprobs", "values")


def loss_of_values(out: TokenOutputs, batch: Batch) -> Tensor:
    assert out.values is not None
    return loss(out, batch) + (out.values * batch["loss_mask"]).square().sum()


@contextmanager
def critic(backend: str, **settings: Any) -> Iterator[TrainEngine]:
    """Start an engine whose value head only some losses reach, which an engine otherwise prevents."""
    path = model_dir("qwen3", num_hidden_layers=2)
    changes = {"path": path, "value_head": True, "megatron": settings, "mb_spec": {"samples_per_mb": 1}}
    reached_by_some = mock.patch.object(base, "reach_all_heads", keep)
    with reached_by_some, started(backend, dtype="float32", **changes) as engine:
        yield engine


def keep(loss: Tensor | None, outputs: TokenOutputs) -> Tensor | None:
    return loss


def test_order_does_not_depend_on_what_a_loss_reaches() -> None:
    with critic("megatron:d1", **BUCKETS) as engine, begun_reductions() as order:
        orders, early = [], []
        finalize = engine._gradients.finalize
        engine._gradients.finalize = lambda: (early.append(len(order)), finalize())
        for function in (loss_of_values, loss_of_values, loss, loss, loss_of_values):
            del order[:]
            engine.train_batch(global_batch()[:3], function, outputs=RETURNS, returns=RETURNS)
            orders.append(list(order))
    assert len(set(orders[0])) == len(orders[0]) > 3
    assert all(order == orders[0] for order in orders)
    assert early == [len(orders[0])] * 5


def test_reductions_begin_before_the_backward_has_ended() -> None:
    """A bucket waits for those before it, and not for the rest of the backward."""
    with critic("megatron:d1", **BUCKETS) as engine, begun_reductions() as order:
        for _ in range(2):
            del order[:]
            seen: list[int] = []
            first = next(engine._components.model[0].module.parameters())
            hook = first.register_hook(lambda grad, seen=seen: seen.append(len(order)))
            engine.train_batch(global_batch()[:1], loss_of_values, outputs=RETURNS, returns=RETURNS)
            hook.remove()
    # The embedding is the last parameter that a backward reaches, in the last bucket.
    assert seen == [len(order) - 1]


def train(engine: TrainEngine, functions: list[Any]) -> list[float]:
    steps = [
        engine.train_batch(uneven_batch(engine), function, outputs=RETURNS, returns=RETURNS) for function in functions
    ]
    return [number for step in steps for number in (step.loss, step.grad_norm)]


@pytest.mark.parametrize(
    ("backend", "gather"),
    [
        layout("megatron:d2", False),
        layout("megatron:d2", True),
        layout("megatron:d2p2", False),
    ],
)
def test_ranks_whose_losses_reach_other_parameters_train_alike(backend: str, gather: bool) -> None:
    """The first rank ends with a micro-batch that only fills up, which reaches the value head, and the other one does not."""
    functions = [loss, loss, loss_of_values, loss]
    with critic(backend, overlap_grad_reduce=False) as engine:
        expected = train(engine, functions)
    with critic(backend, overlap_param_gather=gather, **BUCKETS) as engine:
        assert train(engine, functions) == pytest.approx(expected, rel=1e-5)
        with raised(RuntimeError, "no such column", DISCARDED):
            train(engine, [explode if engine.dp_rank else loss])
        train(engine, [loss])


@pytest.mark.parametrize(
    ("backend", "apart"),
    [
        layout("megatron:d2", False),
        layout("megatron:c2", True),
        layout("megatron:e2", True),
        layout("megatron:d2t2", False),
    ],
)
def test_no_layer_communicates_in_the_group_of_buckets(backend: str, apart: bool) -> None:
    family = "qwen3_moe" if backend == "megatron:e2" else "qwen3"
    with started(backend, path=model_dir(family)) as engine:
        groups = engine._components.schedule._groups
        used = [bucket.data_parallel_group for chunk in engine._components.model for bucket in chunk.buffers]
        layers = [groups.tp, groups.cp, groups.tp_cp, groups.ep, groups.expt_tp, groups.tp_ep]
        assert used
        assert not [group for group in used if group.size() > 1 and group in layers]
        assert (groups.dp_cp is not groups.dp if backend != "megatron:c2" else groups.dp_cp is not groups.cp) == apart
