"""Layouts and batches of the search: what the engine would choose with all layers, micro-batches of a pipeline, recomputation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from areal.api.parallel import ParallelDims
from areal.plan.hardware import Hardware
from areal.plan.layout_plan import plan_layout
from areal.plan.layout_search import PlanJob, best_layouts
from areal.plan.trace import Trace
from areal.tests.harness.tiny import NEEDS_CPU, family_dir
from areal.tests.harness.world import no_world
from areal.tests.unit.plan.jobs import SETTINGS, job


@pytest.fixture(autouse=True)
def _process_without_a_world() -> Iterator[None]:
    with no_world():
        yield


def test_few_layers_reduce_gradients_as_all_do() -> None:
    planned = job(tokens_per_rank=128, micro_batch=64)
    # A quarter holds the unsharded gradients of one and two layers, and not of eight, which are reduced on each of two micro-batches.
    limited = replace(planned, memory=room_for_gradients_of(2, planned))
    dims, layers = ParallelDims.parse("fsdp:d64"), planned.uniform_layers()
    assert layers is not None
    full, short = limited.plan(dims).largest.trace, limited.plan(dims, layers).largest.trace
    modules = 8 + 1
    assert [reduced(full), reduced(short)] == [2 * modules] * 2
    assert full.memory["gradients"] == pytest.approx(short.memory["gradients"], rel=0.02)


def room_for_gradients_of(layers: int, planned: PlanJob) -> int:
    """Return bytes of which a quarter holds the unsharded gradients of a model with this many layers, and a half more."""
    trace = replace(planned, model=job(layers).model).plan(ParallelDims.parse("fsdp:d64")).largest.trace
    return round(4 * 1.5 * trace.memory["gradients"])


def reduced(trace: Trace) -> int:
    """Return the number of reductions of gradients to shards."""
    return round(sum(calls.count for kind, calls in trace.collectives.items() if kind.name == "reduce_scatter"))


def test_share_of_recomputed_layers_needs_all_layers() -> None:
    settings = {**SETTINGS, "activation_checkpointing": "full"}
    assert job(settings=settings).uniform_layers() is not None
    assert job(settings={**settings, "fsdp": {"checkpointed_share": 0.5}}).uniform_layers() is None


@pytest.mark.parametrize(("sequences", "at_once"), [(1, 1), (7, 1), (8, 1), (11, 2), (13, 2), (16, 2), (34, 5)])
def test_micro_batches_of_a_pipeline_need_not_divide_its_sequences(sequences: int, at_once: int) -> None:
    planned = job(tokens_per_rank=32 * sequences)
    workload = planned.workload(ParallelDims.parse("fsdp:p2"))
    assert (workload.sequences, workload.sequences_at_once) == (sequences, at_once)
    # Without a pipeline there is one, and for memory there may be as many as sequences.
    assert planned.workload(ParallelDims.parse("fsdp:t2")).sequences_at_once == sequences
    assert planned.workload(ParallelDims.parse("fsdp:t2"), 1 << 20).sequences_at_once == 1


@NEEDS_CPU
def test_pipeline_that_need_not_recompute_is_found() -> None:
    # One rank on a node, so that there is no t; communication, memory and launches take no time, so that only the computation counts.
    free = Hardware(ranks_per_node=1, memory_gbps=1e6, node_gbps=1e6, network_gbps=1e6, latency_us=0.0, launch_us=0.0)
    # A small head, so that the stages take equally long.
    small = family_dir("qwen3", num_hidden_layers=2, vocab_size=64)
    planned = replace(job(tokens_per_rank=256, hardware=free), model=small)

    # Enough for the pipeline, in micro-batches of one sequence, to keep its activations.
    pipeline, work = ParallelDims.parse("megatron:p2"), planned.workload(ParallelDims.parse("megatron:p2"), 1 << 20)
    kept = plan_layout(planned.config(pipeline, work, "none"), work, free, planned.memory)
    memory = int(kept.largest.nbytes) + 1
    found = best_layouts(replace(planned, memory=memory), "megatron", 2, None, str)
    assert [(plan.config.backend, plan.config.activation_checkpointing) for plan in found] == [
        ("megatron:p2", "none"),
        ("megatron:d2", "full"),
    ]
