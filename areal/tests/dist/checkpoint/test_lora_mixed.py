"""Samples of one call that name several adapters: parity, isolation, faults and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from areal.api import Batch, FinetuneSpec, LoRAConfig, MicroBatchSpec, ParallelDims, TokenOutputs, TrainEngine
from areal.dispatch import WorkerGroup
from areal.tests.dist.checkpoint.test_lora import moments, of
from areal.tests.grid.cases import as_input
from areal.tests.grid.cell_engine import CellEngine, start_cell
from areal.tests.grid.compare import assert_number, assert_rows, assert_tensors
from areal.tests.grid.layouts import LORA, Cell, Layout
from areal.tests.grid.models import adapter_dir, model_dir
from areal.tests.grid.reference import Reference, ReferenceStep
from areal.tests.harness.tiny import config, global_batch, gradients_of, local_batch, loss, same_bits, started
from areal.tests.harness.world import cached

Sample = dict[str, Tensor]

ADAPTERS = {
    "default": (LORA, True),
    "narrow": (LoRAConfig(rank=3, target_modules=("q_proj", "v_proj")), False),
    "late": (LoRAConfig(rank=5, alpha=7, target_modules=("o_proj", "lm_head")), False),
}
"""Adapters of different ranks, scales and layers, and whether each also has the head."""

ORDER = (1, 0, 2, 2, 0, 1, 0, 2, 1, 1)
"""Adapter of each sample: none is next to all others of its adapter."""

UNEVEN = {"vocab_size": 115}


def named(samples: list[Sample], order: tuple[int, ...] = ORDER) -> list[Sample]:
    """Return samples that name their adapter."""
    return [{**sample, "adapter": torch.tensor(k)} for sample, k in zip(samples, order, strict=False)]


def without_key(samples: list[Sample], adapter: int) -> list[Sample]:
    """Return the samples of one adapter, without the key."""
    return [
        {key: x for key, x in sample.items() if key != "adapter"} for sample in samples if sample["adapter"] == adapter
    ]


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


def param(backend: str, *, thorough: bool = True, family: str = "qwen3_tied", **fields: Any) -> Any:
    marks = [pytest.mark.world(ParallelDims.parse(backend).world_size)]
    marks += [pytest.mark.thorough] if thorough else []
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
        param("fsdp:t2", thorough=False),
        param("megatron:p2", thorough=False),
        param("fsdp:d2", thorough=False, empty_rank="last"),
        param("fsdp:p2", thorough=False),
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
        param("fsdp:t2", cut="whole"),
        param("megatron:d1"),
        param("megatron:d2", empty_rank="last"),
        param("megatron:t2"),
        param("megatron:c2"),
        param("megatron:p2v2"),
        param("fsdp:d2t2"),
        param("fsdp:d2p2", empty_rank="last"),
        param("fsdp:c2t2", how="gather_kv"),
        param("megatron:t2p2"),
        param("megatron:c2t2"),
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
        idle = [x.clone() for x in grads_of(engine, "idle")]

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

        # Each adapter has the gradient of its own samples.
        assert all(torch.equal(a, b) for a, b in zip(grads_of(engine, "idle"), idle, strict=True))
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


def grads_of(engine: Any, name: str) -> list[Tensor]:
    """Return this rank's pending gradients of an adapter."""
    return [p.grad for p in engine.adapters[name].parameters if p.grad is not None]


# ---- bits on one process


def start_adapters(engine: Any, path: str) -> None:
    """Load the adapters. No factor is zero."""
    for name, (lora, head) in ADAPTERS.items():
        engine.adapters.load(name, adapter_dir(path, lora, head=head))


EVEN = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
"""Sizes that are multiples of 32. For the last numbers of another size, an elementwise kernel of a CPU may round otherwise."""

SINGLE = [
    pytest.param(backend, options, id=f"{backend}-{name}", marks=[pytest.mark.world(1), *marks])
    for backend, name, options, marks in (
        ("fsdp:d1", "plain", {}, []),
        ("megatron:d1", "plain", {}, []),
        ("fsdp:d1", "rows", {"fsdp": {"attention": "rows"}}, [pytest.mark.thorough]),
        ("fsdp:d1", "recompute", {"activation_checkpointing": "full"}, [pytest.mark.thorough]),
        ("fsdp:d1", "selective", {"activation_checkpointing": "selective"}, [pytest.mark.thorough]),
        ("fsdp:d1", "whole", {"mb_spec": MicroBatchSpec()}, [pytest.mark.thorough]),
        ("megatron:d1", "recompute", {"activation_checkpointing": "full"}, [pytest.mark.thorough]),
    )
]


@pytest.mark.parametrize(("backend", "options"), SINGLE)
def test_training_together_equals_training_in_turn_bitwise(backend: str, options: dict[str, Any]) -> None:
    """Two steps, each of two accumulated calls with several micro-batches: weights, moments and outputs. The batch is a padded one."""
    path = model_dir("qwen3_tied", **EVEN)
    results = []
    for together in (True, False):
        with started(backend, path=path, lora=LORA, **options) as engine:
            start_adapters(engine, path)
            outputs: list[list[Tensor]] = []
            for number in range(2):
                for seed in (2 * number, 2 * number + 1):
                    outputs += forward_backward(engine, named(global_batch(seed)), together)
                for name in reversed(ADAPTERS):
                    engine.adapters.select(name)
                    engine.optimizer_step()
            states = {}
            for name in ADAPTERS:
                engine.adapters.select(name)
                states |= {f"{name}/{key}": x for key, x in (of(engine) | moments(engine, name)).items()}
            results.append((outputs, states))
    (outputs, states), (other_outputs, other_states) = results
    assert all(
        torch.equal(a, b) for x, y in zip(outputs, other_outputs, strict=True) for a, b in zip(x, y, strict=True)
    )
    assert same_bits(states, other_states)


def forward_backward(engine: TrainEngine, samples: list[Sample], together: bool) -> list[list[Tensor]]:
    """Run one call, or one for each adapter. Return the log-probs and entropies of each adapter's samples, in order."""
    options: dict[str, Any] = {"normalization": "sum", "returns": ("logprobs", "entropy")}
    lengths = [len(sample["input_ids"]) for sample in samples]
    if together:
        step = engine.forward_backward(as_input(samples, "padded"), loss, **options)
        assert step.n_tokens == sum(lengths)
        rows = {name: [row[:n] for row, n in zip(x, lengths, strict=True)] for name, x in step.outputs.items()}
    out = []
    for index, name in enumerate(engine.adapters.names):
        engine.adapters.select(name)
        if not together:
            rows = engine.forward_backward(without_key(samples, index), loss, **options).outputs
        mine = [k for k, sample in enumerate(samples) if sample["adapter"] == index]
        out += [[x[k] for k in mine] if together else x for x in rows.values()]
    return out


@pytest.mark.world(1)
@pytest.mark.thorough
def test_compiled_layers_have_several_adapters() -> None:
    path = model_dir("qwen3_tied")
    rows = []
    for section in ({}, {"compile": True, "compile_backend": "aot_eager"}):
        with started("fsdp:d1", path=path, lora=LORA, fsdp=section) as engine:
            start_adapters(engine, path)
            plain = engine.forward_batch(global_batch())
            mixed = forward_backward(engine, named(global_batch()), True)
            rows.append([*plain, *(x for part in mixed for x in part), *gradients_of(engine).values()])
    for a, b in zip(*rows, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


# ---- groups of ranks


@pytest.mark.world(1)
def test_group_takes_the_key() -> None:
    group = WorkerGroup(config("fsdp:d1", lora=LORA))
    group.initialize(FinetuneSpec(total_train_steps=10))
    with group:
        group.adapters.add("second", LoRAConfig(rank=2), seed=4)
        batch = named(global_batch(), (0, 1, 1, 0, 1, 0, 0, 1, 1))
        step = group.forward_backward(batch, loss, normalization="sum", returns=("logprobs",))
        mbs = group.microbatches(batch)
        assert mbs.adapters == ("default", "second")
        for mb in mbs:
            assert mb.adapters == tuple(mbs.adapters[int(batch[i]["adapter"])] for i in mb.sample_ids)
            assert list(mb.adapters) == sorted(mb.adapters)
        rows = mbs.restore(group.forward_backward_batch(mbs, lambda out, mb: (None, out.logprobs), forward_only=True))
        assert all(torch.equal(a, b) for a, b in zip(rows, step.outputs["logprobs"], strict=True))
        for name in group.adapters.names:
            group.adapters.select(name)
            assert group.optimizer_step().update_successful


# ---- faults


def raising(out: TokenOutputs, batch: Batch) -> Tensor:
    """Raise for samples of the adapter 2."""
    if (batch["adapter"] == 2).any():
        raise RuntimeError("a loss of one adapter")
    return loss(out, batch)


def infinite(out: TokenOutputs, batch: Batch) -> Tensor:
    return loss(out, batch) / (batch["adapter"] != 2).all()


@pytest.mark.parametrize(
    ("backend", "wrong"),
    [
        pytest.param("fsdp:d1", infinite, marks=pytest.mark.world(1)),
        pytest.param("fsdp:d2", raising, marks=pytest.mark.world(2)),
        *(
            pytest.param(backend, wrong, marks=[pytest.mark.world(2), pytest.mark.thorough])
            for backend in ("fsdp:p2", "megatron:p2", "megatron:t2")
            for wrong in (raising, infinite)
        ),
    ],
)
def test_failed_call_changes_no_pending_gradient(backend: str, wrong: Any) -> None:
    """Gradients are pending: reduced already, not reduced, and none. A call that fails in a later micro-batch restores them."""
    path = model_dir("qwen3_tied")
    results = []
    for fails in (False, True):
        with started(backend, path=path, lora=LORA) as engine:
            start_adapters(engine, path)
            for name in ("default", "narrow"):
                engine.adapters.select(name)
                engine.forward_backward(local_batch(engine, global_batch(1)), loss, normalization="sum")
            gradients = gradients_of(engine)
            if fails:
                with pytest.raises((RuntimeError, ValueError), match="nothing was added to any pending gradient"):
                    engine.forward_backward(local_batch(engine, named(global_batch(2))), wrong, normalization="sum")
                engine.adapters.select("late")
                with pytest.raises(RuntimeError, match="no gradient is pending"):
                    engine.optimizer_step()
                engine.adapters.select("narrow")
                assert same_bits(gradients_of(engine), gradients)
            # A further call, and a step of each.
            engine.forward_backward(local_batch(engine, named(global_batch(3))), loss, normalization="sum")
            norms = []
            for name in ADAPTERS:
                engine.adapters.select(name)
                norms.append(engine.optimizer_step().grad_norm)
            results.append(
                (norms, {f"{name}/{key}": x for name in ADAPTERS for key, x in moments(engine, name).items()})
            )
    assert results[0][0] == results[1][0]
    assert same_bits(results[0][1], results[1][1])


# ---- refusals


@pytest.mark.world(1, 2)
def test_wrong_adapters_are_refused() -> None:
    size = dist.get_world_size()
    first = dist.get_rank() == 0
    with started(f"fsdp:d{size}", lora=LORA) as engine:
        engine.adapters.add("b")
        samples = local_batch(engine, global_batch())
        both = named(samples, (0, 1) * 5)

        def with_value(value: Any) -> list[Sample]:
            """Change one sample of rank 0."""
            return [{**both[0], "adapter": torch.tensor(value)}, *both[1:]] if first else both

        for call, message in (
            (
                lambda: engine.forward_batch(with_value(2)),
                r"key 'adapter' is 2 in sample 0: .* \('default', 'b'\), from 0 to 1",
            ),
            (lambda: engine.forward_batch(with_value(-1)), r"key 'adapter' is -1 in sample 0"),
            (
                lambda: engine.forward_batch([{**sample, "adapter": torch.tensor([1])} for sample in samples]),
                "key 'adapter' is not one integer per sample",
            ),
            (
                lambda: engine.forward_batch([{**sample, "adapter": torch.tensor(1.0)} for sample in samples]),
                "key 'adapter' is not one integer per sample",
            ),
            (
                lambda: engine.forward_backward(both, loss),
                r"'weight' divides by the weight of all samples, .* \(default, b\)",
            ),
            (lambda: engine.train_batch(both, loss), "key 'adapter' in a batch of train_batch"),
        ):
            with pytest.raises(ValueError, match=message):
                call()
        if size == 2:
            with pytest.raises(ValueError, match="key 'adapter' is missing in the batch of rank 1"):
                engine.forward_batch(both if first else samples)
        # An adapter that is removed between the two parts of a call.
        mbs = engine.microbatches(both)
        engine.adapters.remove("b")
        for forward_only in (True, False):
            with pytest.raises(ValueError, match="there is no adapter 'b'"):
                engine.forward_backward_batch(
                    mbs, lambda out, mb: (out.logprobs.sum(), None), forward_only=forward_only
                )
        # One adapter in all samples: its global weight is defined.
        zeros = named(samples, (0,) * 10)
        assert engine.forward_backward(zeros, loss).loss == engine.eval_batch(samples, loss).loss
        with engine.reference():
            reference = engine.forward_batch(zeros)
            with pytest.raises(RuntimeError, match=r"inside reference\(\) nothing is trained"):
                engine.forward_backward(zeros, loss)
        assert all(torch.equal(a, b) for a, b in zip(reference, engine.forward_batch(zeros), strict=True))
        engine.optimizer_step()
    with (
        started(f"fsdp:d{size}") as engine,
        pytest.raises(ValueError, match="but the engine has no adapters: leave it out"),
    ):
        engine.forward_batch(both)


@pytest.mark.world(2)
def test_ranks_of_a_coordinate_name_the_same_adapters() -> None:
    with started("fsdp:t2", lora=LORA) as engine:
        engine.adapters.add("b")
        samples = named(global_batch(), (0, 1) * 5 if dist.get_rank() else (1, 0) * 5)
        with pytest.raises(
            ValueError, match="ranks 0 and 1 share data-parallel coordinate 0 but were passed different"
        ):
            engine.forward_batch(samples)
