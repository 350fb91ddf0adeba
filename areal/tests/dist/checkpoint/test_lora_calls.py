"""Calls whose samples name several adapters: bits, groups of ranks, faults and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from areal.api import (
    Batch,
    FinetuneSpec,
    LoRAConfig,
    MicroBatchSpec,
    OptimizerConfig,
    SaveLoadMeta,
    TokenOutputs,
    TrainEngine,
)
from areal.dispatch import WorkerGroup
from areal.tests.dist.checkpoint.lora_engines import ADAPTERS, moments, named, of, without_key
from areal.tests.grid.cases import as_input
from areal.tests.grid.layouts import LORA
from areal.tests.grid.models import adapter_dir, model_dir
from areal.tests.harness.tiny import (
    config,
    global_batch,
    gradients_of,
    layout,
    local_batch,
    loss,
    same_bits,
    started,
)

Sample = dict[str, Tensor]


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
        ("fsdp:d1", "rows", {"fsdp": {"attention": "rows"}}, []),
        ("fsdp:d1", "recompute", {"activation_checkpointing": "full"}, []),
        ("fsdp:d1", "selective", {"activation_checkpointing": "selective"}, []),
        ("fsdp:d1", "whole", {"mb_spec": MicroBatchSpec()}, []),
        ("megatron:d1", "recompute", {"activation_checkpointing": "full"}, []),
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
def test_compiled_layers_have_several_adapters() -> None:
    path = model_dir("qwen3_tied")
    rows = []
    for section in ({}, {"compile": True, "compile_backend": "aot_eager"}):
        # One micro-batch: graphs of several lengths are compared elsewhere.
        with started("fsdp:d1", path=path, lora=LORA, fsdp=section, mb_spec=MicroBatchSpec()) as engine:
            start_adapters(engine, path)
            plain = engine.forward_batch(global_batch())
            mixed = forward_backward(engine, named(global_batch()), True)
            rows.append([*plain, *(x for part in mixed for x in part), *gradients_of(engine).values()])
    for a, b in zip(*rows, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


# ---- groups of ranks


@pytest.mark.world(1)
@pytest.mark.parametrize("backend", ["fsdp:d1", layout("jax:d1")])
def test_group_takes_the_key(backend: str) -> None:
    group = WorkerGroup(config(backend, lora=LORA))
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
        # In JAX, a forward and a training pass are two programs, which XLA may round differently.
        error = 1e-5 if backend.startswith("jax") else 0.0
        for row, expected in zip(rows, step.outputs["logprobs"], strict=True):
            torch.testing.assert_close(row, expected, rtol=0.0, atol=error)
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
        pytest.param("fsdp:d2", infinite, marks=pytest.mark.world(2)),
        pytest.param("fsdp:d2", raising, marks=[pytest.mark.world(2)]),
        *(
            pytest.param(backend, wrong, marks=[pytest.mark.world(2)])
            for backend in ("fsdp:p2", "megatron:p2", "megatron:t2")
            for wrong in (raising, infinite)
        ),
        pytest.param("jax:d2", infinite, marks=[pytest.mark.world(2, timeout=400)]),
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


@pytest.mark.world(2)
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
        # The adapter "b" is removed after its micro-batches were made.
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


@pytest.mark.world(1)
@pytest.mark.parametrize(("first", "second"), [("sgd", "adamw"), ("adamw", "sgd")])
def test_state_of_another_optimizer_is_refused(first: str, second: str, tmp_path: Path) -> None:
    kinds = {"sgd": OptimizerConfig(type="sgd", lr=0.1, momentum=0.9), "adamw": OptimizerConfig(lr=1e-2)}
    with started("fsdp:d1", lora=LORA, optimizer=kinds[first]) as engine:
        engine.train_batch(global_batch(), loss)
        engine.adapters.save("default", tmp_path / "adapter", with_optim=True)
        engine.save(SaveLoadMeta(tmp_path / "run", weight_format="dcp"))
    message = f"is of the optimizer '{first}', and this run has '{second}': load it with with_optim=False"
    with started("fsdp:d1", lora=LORA, optimizer=kinds[second]) as engine:
        with pytest.raises(ValueError, match=message):
            engine.adapters.load("theirs", tmp_path / "adapter", with_optim=True)
        with pytest.raises(ValueError, match=message):
            engine.load(SaveLoadMeta(tmp_path / "run", weight_format="dcp"))
        engine.adapters.load("theirs", tmp_path / "adapter")
        engine.train_batch(global_batch(), loss)


@pytest.mark.world(2)
def test_load_inside_of_reference_harms_nothing(tmp_path: Path) -> None:
    with started("fsdp:d2", lora=LORA) as engine:
        samples = local_batch(engine, global_batch())
        with engine.reference():
            with pytest.raises(RuntimeError, match=r"inside reference\(\) nothing is trained"):
                engine.load(SaveLoadMeta(tmp_path / "run", weight_format="dcp"))
            engine.forward_batch(samples)
        engine.train_batch(samples, loss)
