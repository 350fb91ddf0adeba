"""Properties of one engine: determinism, modes, options without effect on numbers, learning rate, precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD
from torch.utils._python_dispatch import TorchDispatchMode

from areal.api import Batch, Metric, OptimizerConfig, TokenOutputs, TrainEngine, default_loss_weight
from areal.tests.grid.float64_mode import float64_everywhere
from areal.tests.grid.reference import Reference
from areal.tests.harness.tiny import (
    family_dir,
    global_batch,
    gpt2_dir,
    gradients_of,
    layouts,
    local_batch,
    loss,
    same_bits,
    started,
    weights_of,
)
from areal.tests.harness.world import world


def relative(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the distance of two sets of gradients, relative to the norm of one."""
    difference = sum((actual[name].double() - expected[name].double()).square().sum() for name in expected)
    return (difference / sum(x.double().square().sum() for x in expected.values())).sqrt().item()


def length(gradients: dict[str, Tensor]) -> float:
    """Return the norm of all gradients together."""
    return sum(x.double().square().sum() for x in gradients.values()).sqrt().item()


# ---- determinism


@pytest.mark.parametrize("backend", layouts(1, 2))
def test_same_seed_and_layout_are_bitwise_equal(backend: str) -> None:
    def run(seed: int) -> tuple[list[float], dict[str, Tensor]]:
        with started(backend, path=family_dir("llama"), init_from_scratch=True, seed=seed, dtype="bfloat16") as engine:
            losses = [engine.train_batch(local_batch(engine, global_batch(i)), loss).loss for i in range(3)]
            return losses, weights_of(engine)

    first, again, other = run(1), run(1), run(2)
    assert first[0] == again[0]
    assert same_bits(first[1], again[1])
    assert first[0] != other[0]


@pytest.mark.world(1)
def test_deterministic_mode_gives_equal_numbers() -> None:
    before = torch.are_deterministic_algorithms_enabled()
    try:
        with started("fsdp:d1", deterministic=True) as engine, started("fsdp:d1") as plain:
            assert engine.train_batch(global_batch(), loss).loss == plain.train_batch(global_batch(), loss).loss
            assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(before)


# ---- dropout


@pytest.mark.world(1, 2)
def test_dropout_is_active_only_in_training() -> None:
    backend = f"fsdp:d{world().size}"
    with (
        started(backend, path=gpt2_dir(resid_pdrop=0.4, embd_pdrop=0.2)) as engine,
        started(backend, path=gpt2_dir()) as sure,
    ):
        batch = local_batch(engine, global_batch())
        expected = sure.eval_batch(batch, loss).loss
        for _ in range(2):
            assert engine.eval_batch(batch, loss).loss == expected
            assert all(map(torch.equal, engine.forward_batch(batch), sure.forward_batch(batch)))
            first = engine.forward_backward(batch, loss).loss
            engine.zero_grad()
            second = engine.forward_backward(batch, loss).loss
            engine.zero_grad()
            assert len({first, second, expected}) == 3, "dropout draws anew in each call"


@pytest.mark.world(1, 2)
@pytest.mark.parametrize("attention_dropout", [0.0, 0.1], ids=["packed", "rows"])
def test_unknown_family_trains(attention_dropout: float) -> None:
    """Train GPT-2, a model without family-specific code. With attention dropout it runs one sequence per row."""
    path = gpt2_dir(attn_pdrop=attention_dropout)
    with started(f"fsdp:d{world().size}", path=path) as engine:
        expected = Reference(gpt2_dir()).step(global_batch(), loss, default_loss_weight)
        actual = engine.eval_batch(local_batch(engine, global_batch()), loss)
        assert actual.loss == pytest.approx(expected.loss, rel=2e-5)
        step = engine.train_batch(local_batch(engine, global_batch()), loss)
        assert step.update_successful
        if not attention_dropout:
            assert step.grad_norm == pytest.approx(expected.grad_norm, rel=2e-5)
        losses = [engine.train_batch(local_batch(engine, global_batch()), loss).loss for _ in range(5)]
        assert losses[-1] < actual.loss


# ---- options that do not change numbers


class Reductions(TorchDispatchMode):
    """Count reduce-scatters in forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "c10d" in str(func) and "reduce_scatter" in str(func)
        return func(*args, **(kwargs or {}))


# the other engines reduce once per step, independently of grad_sync
@pytest.mark.parametrize("backend", layouts(2, engine="fsdp", but=("fsdp:p2",)))
def test_gradients_are_reduced_per_call_or_per_micro_batch(backend: str) -> None:
    result: dict[str, tuple[int, int, dict[str, Tensor]]] = {}
    for when in ("call", "micro_batch"):
        with started(backend, grad_sync=when) as engine:
            mbs = engine.microbatches(local_batch(engine, global_batch()))
            with Reductions() as reductions:
                engine.forward_backward(local_batch(engine, global_batch()), loss)
            result[when] = reductions.count, len(mbs), gradients_of(engine)
    groups = 3  # two layers and the root
    (once, n, gradients), (each, _, same) = result["call"], result["micro_batch"]
    assert n > 1
    assert once == groups
    assert each == groups * n
    assert relative(same, gradients) < 1e-6


@pytest.mark.parametrize("backend", layouts(1, 2))
def test_memory_options_do_not_change_results(backend: str) -> None:
    options: dict[str, dict[str, Any]] = {"recompute": {"activation_checkpointing": "full"}}
    if backend.startswith("fsdp"):
        options["keep gathered"] = {"fsdp": {"reshard_after_forward": False}}
        options["on the host"] = {"fsdp": {"cpu_offload": True}}
    with started(backend) as plain:
        losses = [plain.train_batch(local_batch(plain, global_batch(i)), loss).loss for i in range(2)]
        plain.forward_backward(local_batch(plain, global_batch()), loss)
        gradients = gradients_of(plain)
    for name, changes in options.items():
        with started(backend, **changes) as engine:
            assert [engine.train_batch(local_batch(engine, global_batch(i)), loss).loss for i in range(2)] == losses, (
                name
            )
            engine.forward_backward(local_batch(engine, global_batch()), loss)
            assert relative(gradients_of(engine), gradients) < 1e-6, name


# ---- verbs without side effects


@pytest.mark.parametrize("backend", layouts(1, 2))
def test_eval_keeps_gradients_and_weights(backend: str) -> None:
    with started(backend) as engine:
        batch = local_batch(engine, global_batch())
        engine.forward_backward(batch, loss)
        gradients, weights = gradients_of(engine), weights_of(engine)
        evaluations: tuple[Callable[[TrainEngine], Any], ...] = (
            lambda e: e.eval_batch(batch, loss),
            lambda e: e.forward_batch(batch),
            lambda e: e.forward_backward_batch(e.microbatches(batch), lambda o, mb: (None, 0), forward_only=True),
        )
        for evaluate in evaluations:
            evaluate(engine)
            assert same_bits(gradients, gradients_of(engine))
            assert same_bits(weights, weights_of(engine))


@pytest.mark.world(1)
def test_version_is_set_by_the_caller() -> None:
    with started("fsdp:d1") as engine:
        assert engine.version == 0
        engine.set_version(7)
        engine.train_batch(global_batch(), loss)
        assert engine.version == 7


# ---- optimizer


@pytest.mark.world(1, 2)
def test_set_lr_sets_base_lr_of_schedule() -> None:
    optimizer = OptimizerConfig(lr=0.01, lr_scheduler="linear", warmup_steps=2, gradient_clipping=None)
    with started(f"fsdp:d{world().size}", optimizer=optimizer, total_steps=6) as engine:
        batch, rates = local_batch(engine, global_batch()), []
        for step in range(6):
            if step == 3:
                engine.set_lr(0.1)
            assert engine.lr == pytest.approx(step_rate := [0.005, 0.01, 0.01, 0.075, 0.05, 0.025][step])
            rates.append(engine.train_batch(batch, loss).lr)
            assert rates[-1] == pytest.approx(step_rate)
        assert engine.lr == 0


@pytest.mark.world(1, 2)
def test_sgd_with_clipping_equals_torch() -> None:
    optimizer = OptimizerConfig(type="sgd", lr=0.2, momentum=0.9, weight_decay=0.1, gradient_clipping=0.5)
    with started(
        f"fsdp:d{world().size}",
        dtype="float64",
        master_dtype="float64",
        grad_reduce_dtype="float64",
        optimizer=optimizer,
    ) as engine:
        with float64_everywhere():
            reference = Reference(family_dir("qwen3"))
        parameters = list(reference.model.parameters())
        inner = SGD(parameters, lr=0.2, momentum=0.9, weight_decay=0.1)
        for seed in range(3):
            inner.zero_grad()
            expected = reference.step(global_batch(seed), loss, default_loss_weight)
            norm = torch.nn.utils.clip_grad_norm_(parameters, 0.5)
            inner.step()
            actual = engine.train_batch(local_batch(engine, global_batch(seed)), loss)
            assert actual.loss == pytest.approx(expected.loss, rel=1e-5)
            assert actual.grad_norm == pytest.approx(norm.item(), rel=1e-5)
        assert relative(weights_of(engine), dict(reference.named_tensors())) < 1e-5


# ---- modes of torch


@pytest.mark.parametrize("backend", layouts(1))
def test_first_call_in_inference_mode_leaves_the_engine_usable(backend: str) -> None:
    """FSDP creates its gathered parameters in the first call."""
    with started(backend) as engine, started(backend) as untouched:
        batch = global_batch()
        with torch.inference_mode():
            made_inside = [{key: x.clone() for key, x in sample.items()} for sample in batch]
            outputs, evaluated = engine.forward_batch(made_inside), engine.eval_batch(batch, loss).loss
            with pytest.raises(ValueError, match=r"inside torch.inference_mode\(\) no gradient can be computed"):
                engine.train_batch(batch, loss)
        assert all(map(torch.equal, outputs, untouched.forward_batch(batch)))
        assert evaluated == untouched.eval_batch(batch, loss).loss
        engine.forward_backward(made_inside, loss)
        with torch.inference_mode():
            engine.optimizer_step()
        untouched.train_batch(batch, loss)
        assert engine.train_batch(batch, loss).loss == untouched.train_batch(batch, loss).loss


# ---- metrics


@pytest.mark.parametrize("backend", layouts(1, 2))
def test_mean_metric_is_weighted_over_micro_batches_and_ranks(backend: str) -> None:
    """Average rewards: each micro-batch reports a mean over its sequences, and their numbers differ."""

    def with_metrics(out: TokenOutputs, batch: Batch) -> tuple[Tensor, dict[str, Metric]]:
        reward = batch["reward"]
        return loss(out, batch), {
            "reward": Metric(reward.mean(), len(reward)),
            "best": Metric(reward.max(), reduce="max"),
        }

    everything = global_batch()
    rewards = [sample["reward"].item() for sample in everything]
    # The loss is not called for a micro-batch without weight, so give each sequence some.
    batch = [{**sample, "loss_mask": torch.ones_like(sample["loss_mask"])} for sample in everything]
    with started(backend) as engine:
        step = engine.eval_batch(local_batch(engine, batch), with_metrics)
        assert step.n_mbs > 1
        assert step.metrics["reward"] == pytest.approx(sum(rewards) / len(rewards), rel=1e-6)
        assert step.metrics["best"] == max(rewards)


# ---- precision


@pytest.mark.parametrize("backend", layouts(1, 2))
def test_bf16_unnormalized_sum_is_as_accurate_as_scaled_loss(backend: str) -> None:
    """Rounding differs by element, as the scale is not a power of two; the norm and the distance to float64 do not differ."""
    everything, n = global_batch(), 3
    expected = Reference(family_dir("qwen3")).step(everything, loss, default_loss_weight)
    with started(backend, dtype="bfloat16") as engine:
        step = engine.forward_backward(local_batch(engine, everything), loss)
        scaled = gradients_of(engine)
        engine.zero_grad()
        for first in range(n):
            engine.forward_backward(local_batch(engine, everything[first::n]), loss, normalization="sum")
        divided = {name: gradient / step.metrics["weight"] for name, gradient in gradients_of(engine).items()}
        assert all(gradient.dtype == torch.float32 for gradient in divided.values())
        assert length(divided) == pytest.approx(length(scaled), rel=2e-3)
        errors = [relative(actual, expected.gradients) for actual in (divided, scaled)]
        assert max(errors) < 5e-2
        assert errors[0] == pytest.approx(errors[1], abs=2e-3)
        assert relative(divided, scaled) < max(errors)


@pytest.mark.parametrize("backend", layouts(1, 2))
def test_bf16_unnormalized_sum_over_a_million_tokens_is_finite(backend: str) -> None:
    """A power of two scales exactly: the sum over a million tokens differs from that of one batch only in the exponent."""
    with started(backend, dtype="bfloat16") as engine:
        batch = local_batch(engine, global_batch())
        step = engine.forward_backward(batch, loss, normalization="sum")
        one = gradients_of(engine)
        engine.zero_grad()
        factor = 2.0 ** (2**20 // step.n_tokens).bit_length()
        assert factor * step.n_tokens >= 2**20
        engine.forward_backward(batch, loss, normalization="sum", loss_weight=factor)
        many = gradients_of(engine)
        assert all(gradient.isfinite().all() for gradient in many.values())
        assert same_bits(many, {name: gradient * factor for name, gradient in one.items()})
        assert engine.optimizer_step().update_successful
