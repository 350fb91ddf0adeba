"""Samples of one call that name several adapters: parity, isolation, faults and refusals."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from areal.api import ParallelDims
from areal.tests.dist.checkpoint.lora_engines import ADAPTERS, ORDER, named, without_key
from areal.tests.grid.cases import as_input
from areal.tests.grid.cell_engine import CellEngine, start_cell
from areal.tests.grid.compare import assert_number, assert_rows, assert_tensors
from areal.tests.grid.layouts import Cell, Layout
from areal.tests.grid.models import adapter_dir
from areal.tests.grid.reference import Reference, ReferenceStep
from areal.tests.harness.tiny import same_bits
from areal.tests.harness.world import cached

UNEVEN = {"vocab_size": 115}


# ---- parity with the float64 reference


def cell_of(backend: str, family: str, how: str = "", schedule: str = "", **fields: Any) -> Cell:
    changes = UNEVEN if "t2" in backend else {"num_hidden_layers": 4} if "v2" in backend else {}
    section = {"context_parallel": how} if how else {"pipeline_schedule": schedule} if schedule else {}
    options = {"fsdp": section} if section else {}
    return Cell(
        Layout(backend, options=options, changes=changes),
        family=family,
        **{"options": "lora", "cut": "tokens64"} | fields,
    )


def param(backend: str, *, family: str = "qwen3_tied", **fields: Any) -> Any:
    jax = backend.startswith("jax")
    # Compiling takes a minute on a busy machine.
    marks = [pytest.mark.world(ParallelDims.parse(backend).world_size, **({"timeout": 400} if jax else {}))]
    name = "-".join([backend, *([] if family == "qwen3_tied" else [family]), *map(str, fields.values())])
    return pytest.param(backend, family, fields, id=name, marks=marks)


def expected_of(run: CellEngine, name: str, seeds: tuple[int, ...]) -> tuple[list[ReferenceStep], list[list[Tensor]]]:
    """Return the reference's steps on the samples of one adapter, whose gradients accumulate, and their log-probs."""
    cell, folder = run.cell, adapter_dir(run.cell.path, ADAPTERS[name][0], head=ADAPTERS[name][1])
    index = list(ADAPTERS).index(name)

    def compute() -> Any:
        reference = Reference(cell.path, temperature=cell.case.temperature, adapter=folder)
        steps, rows = [], []
        for seed in seeds:
            mine = without_key(named(run.samples(seed)), index)
            steps.append(reference.step(mine, cell.objective.loss_fn, cell.objective.weight_fn, divide_by=1.0))
            rows.append(reference.forward(mine, ("logprobs",))["logprobs"])
        return steps, rows

    return cached("mixed", (cell.path, folder, cell.case_name, seeds, ORDER), compute)


@pytest.mark.parametrize(
    ("backend", "family", "fields"),
    [
        param("fsdp:t2", cut="whole"),
        param("megatron:t2", cut="whole"),
        param("megatron:p2"),
        param("fsdp:d2", empty_rank="last"),
        param("fsdp:p2"),
        param("fsdp:d1"),
        param("fsdp:d1", family="qwen3"),
        param("fsdp:d1", case_name="family", cut="shared40"),
        param("fsdp:d1", family="gemma3_text"),
        param("fsdp:d1", family="qwen3_moe"),
        param("megatron:d1", family="qwen3_moe"),
        param("fsdp:p2v2", schedule="Interleaved1F1B"),
        param("fsdp:d2"),
        param("fsdp:r2"),
        param("fsdp:c2", how="ulysses"),
        param("fsdp:c2", how="gather_kv"),
        param("fsdp:c2", how="gather_kv", case_name="family", cut="shared40"),
        param("fsdp:t2"),
        param("megatron:d1"),
        param("megatron:d2", empty_rank="last"),
        param("megatron:t2"),
        param("megatron:c2"),
        param("megatron:p2v2"),
        param("fsdp:d2p2", empty_rank="last"),
        param("fsdp:c2t2", how="gather_kv"),
        param("megatron:t2p2"),
        param("jax:t2", cut="whole"),
    ],
)
def test_each_adapter_has_the_gradient_of_its_samples(backend: str, family: str, fields: dict[str, Any]) -> None:
    """Layers are recomputed: in a pipeline after the forward of a later micro-batch, which has other runs."""
    cell = cell_of(backend, family, **fields)
    call, seeds = (cell.objective.loss_fn, cell.objective.weight_fn), (0, 1)
    with start_cell(cell) as run:
        engine, adapters = run.engine, run.engine.adapters
        for name, (lora, head) in ADAPTERS.items():
            adapters.load(name, adapter_dir(cell.path, lora, head=head))
        adapters.add("idle", seed=3)
        assert adapters.names == (*ADAPTERS, "idle")

        # An adapter that no sample names has pending gradients.
        adapters.select("idle")
        engine.forward_backward(run.batch(5), *call, normalization="sum")
        idle = {name: x.clone() for name, x in grads_of(engine, "idle").items()}

        # Outputs are in the caller's order. The selected adapter does not matter.
        batches = [shard(run, seed) for seed in seeds]
        expected = {name: expected_of(run, name, seeds) for name in ADAPTERS}
        everyones = [by_sample(expected, len(run.samples(seed)), seed) for seed in seeds]
        rows = engine.forward_batch(batches[0])
        assert_rows(as_rows(run, rows), everyones[0], run.local_indices, cell.tolerance)
        for seed in seeds:
            step = engine.forward_backward(batches[seed], *call, normalization="sum", returns=("logprobs",))
            total = sum(steps[seed].loss for steps, _ in expected.values())
            assert_number(step.loss, total, cell.tolerance)
            assert_rows(as_rows(run, step.outputs["logprobs"]), everyones[seed], run.local_indices, cell.tolerance)
        weights = sum(steps[0].weights["loss"] for steps, _ in expected.values())
        evaluated = engine.eval_batch(batches[0], *call)
        assert_number(evaluated.loss, sum(steps[0].loss for steps, _ in expected.values()) / weights, cell.tolerance)

        # The gradient of each adapter is that of its samples.
        assert same_bits(grads_of(engine, "idle"), idle)
        for name, (steps, _) in expected.items():
            adapters.select(name)
            assert_tensors(engine.named_gradients(), steps[-1].gradients, cell.gradient_tolerance)
            assert_number(engine.optimizer_step().grad_norm, steps[-1].grad_norm, cell.gradient_tolerance)
        adapters.select("idle")
        engine.optimizer_step()


def shard(run: CellEngine, seed: int) -> Any:
    """Return this rank's shard of a batch whose samples name their adapters."""
    everything = named(run.samples(seed))
    return as_input([everything[i] for i in run.local_indices], run.cell.case.form, like=everything[0])


def by_sample(expected: dict[str, Any], count: int, seed: int) -> list[Tensor]:
    """Return the reference's log-probs in the order of the batch."""
    rows = {name: iter(rows[seed]) for name, (_, rows) in expected.items()}
    return [next(rows[list(ADAPTERS)[k]]) for k in ORDER[:count]]


def as_rows(run: CellEngine, outputs: Any) -> list[Tensor]:
    if run.cell.case.form == "list":
        return outputs
    lengths = [len(run.samples()[i]["input_ids"]) for i in run.local_indices]
    return [row[:n] for row, n in zip(outputs, lengths, strict=True)]


def grads_of(engine: Any, name: str) -> dict[str, Tensor]:
    """Return this rank's pending gradients of an adapter."""
    return {f.name: f.parameter.grad for f in engine.adapters[name].factors if f.parameter.grad is not None}
