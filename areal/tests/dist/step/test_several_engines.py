"""Several engines with different models and layouts in one world, without leaks."""

from __future__ import annotations

import gc
import itertools
import weakref
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from areal.api import Batch, FinetuneSpec, TokenOutputs
from areal.engine.registry import create_engine
from areal.tests.harness.tiny import (
    config,
    family_dir,
    global_batch,
    layouts,
    local_batch,
    loss,
    process_groups,
    same_bits,
    started,
    weights_of,
)
from areal.tests.harness.world import world
from areal.utils.releases import installed_release

STEPS = 30


def live_tensors() -> list[Tensor]:
    """Return the tensors that are alive in Python."""
    gc.collect()
    return [thing for thing in gc.get_objects() if isinstance(thing, Tensor)]


def memory() -> float:
    """Return the resident memory of this process in MiB."""
    return psutil.Process().memory_info().rss / 2**20


def regression(out: TokenOutputs, batch: Batch) -> Tensor:
    assert out.values is not None
    return ((out.values - batch["returns"]).square() * batch["loss_mask"]).sum()


def drifting(out: TokenOutputs, batch: Batch) -> Tensor:
    """Compute a policy gradient with a penalty against the reference."""
    return loss(out, batch) + 0.1 * ((out.logprobs - batch["reference"]).square() * batch["loss_mask"]).sum()


@pytest.mark.world(2)
def test_policy_reference_and_critic_train_together_without_leak() -> None:
    groups = process_groups()
    with (
        started("fsdp:d2") as policy,
        started("fsdp:c2", path=family_dir("llama"), optimizer=None) as reference,
        started("fsdp:c2", path=family_dir("qwen2"), value_head=True) as critic,
    ):
        counts: list[tuple[int, int, int]] = []
        used: list[float] = []
        values: list[float] = []
        for step in range(STEPS):
            batch = global_batch(step % 3)
            # Ranks of c2 have the same shard: its outputs cover the full batch on both.
            scored = [{**s, "reference": x} for s, x in zip(batch, reference.forward_batch(batch), strict=True)]
            assert policy.train_batch(local_batch(policy, scored), drifting).update_successful
            values.append(critic.train_batch(batch, regression, outputs=("values",)).loss)
            if step % 10 == 9:
                counts.append((process_groups(), len(live_tensors()), len(gc.get_objects()) // 1000))
                used.append(memory())
        assert values[-1] < 0.9 * values[2], "the critic has learnt nothing"
        # A leak of one tensor per step would add 20 by the last count; pytest itself holds a varying few.
        actual, *_, last = counts
        assert last[0] == actual[0], f"process groups: {counts}"
        assert last[1] - actual[1] < 10, f"live tensors: {counts}"
        # Before 2.13, torch leaks some objects for each parameter and learning rate, in the fused step of sharded parameters.
        leaked = 0 if installed_release("torch") >= (2, 13) else 10
        assert last[2] - actual[2] <= 1 + leaked, f"thousands of objects: {counts}"
        assert used[-1] - used[1] < 8, f"resident MiB: {used}"
        models = [weakref.ref(engine._components.model) for engine in (policy, reference, critic)]
    gc.collect()
    assert [model() for model in models] == [None, None, None]
    assert process_groups() == groups


@pytest.mark.world(2)
def test_several_engines_do_not_affect_each_other() -> None:
    with started("fsdp:d2") as alone:
        for seed in range(3):
            alone.train_batch(local_batch(alone, global_batch(seed)), loss)
        expected = weights_of(alone)
    with started("fsdp:d2") as one, started("fsdp:c2", seed=7, init_from_scratch=True) as other:
        for seed in range(3):
            other.train_batch(global_batch(seed), loss)
            one.train_batch(local_batch(one, global_batch(seed)), loss)
            other.forward_batch(global_batch(seed))
        assert same_bits(weights_of(one), expected)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("backend", layouts(1, 2, but=("fsdp:c2",), also=("megatron:e2",)))
def test_repeated_initialize_and_destroy_do_not_leak(backend: str, family: str) -> None:
    groups: list[int] = []
    elements: list[int] = []
    files: list[int] = []
    for _ in range(4):
        with started(backend, path=family_dir("qwen3_moe" if "e2" in backend else family)) as engine:
            engine.train_batch(local_batch(engine, global_batch()), loss)
            model = weakref.ref(engine._components.model)
        del engine
        assert model() is None
        groups.append(process_groups())
        elements.append(sum(x.numel() for x in live_tensors()))
        files.append(psutil.Process().num_fds())
    assert groups[1:] == groups[:-1], "process groups after each life"
    # torch keeps every mesh that was created, and the list of its ranks.
    kept = 2 * 5 * world().size
    assert all(b - a <= kept for a, b in itertools.pairwise(elements[1:])), f"elements after each life: {elements}"
    assert files[-1] <= files[1] + 1, f"open files and sockets after each life: {files}"


@pytest.mark.world(1, 2)
def test_destroy_is_idempotent_and_initialize_twice_raises() -> None:
    engine = create_engine(config(f"fsdp:d{world().size}"))
    engine.initialize(FinetuneSpec(total_train_steps=10))
    with pytest.raises(RuntimeError, match="already initialized"):
        engine.initialize(FinetuneSpec(total_train_steps=10))
    assert engine.train_batch(local_batch(engine, global_batch()), loss).update_successful
    engine.destroy()
    engine.destroy()
    with pytest.raises(RuntimeError, match="destroyed"):
        engine.train_batch(global_batch(), loss)


@pytest.mark.world(1, 2)
def test_error_in_the_engine_context_destroys_and_propagates() -> None:
    groups, engine = process_groups(), create_engine(config(f"fsdp:d{world().size}"))
    engine.initialize(FinetuneSpec(total_train_steps=10))
    with pytest.raises(ZeroDivisionError), engine as entered:  # noqa: PT012
        assert entered is engine
        raise ZeroDivisionError
    with pytest.raises(RuntimeError, match="destroyed"):
        engine.zero_grad()
    assert process_groups() == groups


@pytest.mark.world(2)
@pytest.mark.parametrize("backend", ["fsdp:d2", "fsdp:c2"])
def test_rank_properties_of_an_engine(backend: str) -> None:
    with started(backend, optimizer=None) as engine:
        dims: dict[str, Any] = {"fsdp:d2": (world().rank, 2, True), "fsdp:c2": (0, 1, world().rank == 0)}
        assert (engine.dp_rank, engine.dp_size, engine.is_main) == dims[backend]
        assert engine.dp_group.size() == engine.dp_size
        x = torch.tensor([1.0, float(world().rank)], dtype=torch.float64)
        total = engine.global_sum(x)
        assert total.tolist() == ([2.0, 1.0] if backend == "fsdp:d2" else x.tolist())
        assert total.dtype == torch.float64
        assert x.tolist() == [1.0, float(world().rank)]
