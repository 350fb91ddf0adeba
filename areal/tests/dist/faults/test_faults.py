"""Faults on one rank: every rank raises within seconds and names that rank, and the engine's state is unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from areal.api import Batch, MicroBatch, MicroBatchSpec, TokenOutputs, default_loss_weight
from areal.engine.registry import create_engine
from areal.tests.dist.faults.twins import DISCARDED, explode, raised, twins
from areal.tests.grid.cases import as_input
from areal.tests.grid.models import VOCAB
from areal.tests.harness.tiny import (
    BATCH_VERBS,
    Sample,
    chosen,
    config,
    global_batch,
    gradients_of,
    layouts,
    local_batch,
    loss,
    same_bits,
    started,
)
from areal.tests.harness.world import world

# ---- batches


def padded(samples: list[Sample]) -> dict[str, Tensor]:
    return as_input(samples, "padded")


def flipped(samples: list[Sample]) -> dict[str, Tensor]:
    return {key: value.flip(1) if value.dim() > 1 else value for key, value in padded(samples).items()}


def changed(samples: list[Sample], key: str, change: Callable[[Tensor], Any]) -> list[dict[str, Any]]:
    """Return the samples with ``key`` of the first one changed."""
    return [{**samples[0], key: change(samples[0][key])}, *samples[1:]]


def put(x: Tensor, value: float) -> Tensor:
    return torch.cat([torch.full_like(x[:1], value), x[1:]])


def overlong(samples: list[Sample]) -> list[Sample]:
    """Repeat every sequence up to 41 tokens, one more than the budget."""
    return [{key: torch.cat([x] * 41)[:41] if x.dim() else x for key, x in sample.items()} for sample in samples]


def hole(samples: list[Sample]) -> dict[str, Tensor]:
    batch = padded(samples)
    batch["attention_mask"][:, 1] = 0
    return batch


BAD_BATCHES: dict[str, tuple[Callable[[list[Sample]], Any], tuple[str, ...]]] = {
    "no columns": (lambda s: {"input_ids": torch.zeros(len(s), 0, dtype=torch.int64)}, ("input_ids is [", ", 0]", "at least 1 token")),
    "empty sequence": (lambda s: [{"input_ids": torch.zeros(0, dtype=torch.int64)}], ("sample 0", "at least 1 token")),
    "not a batch": (lambda s: 7, ("a int", "a dict of padded tensors, or a list")),
    "left padding": (lambda s: flipped(s), ("left-padded", "from_left_padded")),
    "hole": (hole, ("attention_mask[0]", "right-padded")),
    "weights as mask": (lambda s: {**padded(s), "attention_mask": padded(s)["attention_mask"] * 3}, ("holds 3", "1")),
    "labels": (lambda s: [{**x, "labels": x["input_ids"]} for x in s], ("'labels'", "from_hf_labels")),
    "own cu_seqlens": (lambda s: {**padded(s), "cu_seqlens": torch.zeros(2)}, ("'cu_seqlens'", "leave it out")),
    "no ids": (lambda s: [{"loss_mask": x["loss_mask"]} for x in s], ("no 'input_ids'", "loss_mask")),
    "float ids": (lambda s: changed(s, "input_ids", Tensor.float), ("input_ids", "torch.float32", ".long()")),
    "id too large": (lambda s: changed(s, "input_ids", lambda x: put(x, VOCAB)), ("sample 0 at position 0 is 112", "vocabulary of 112")),
    "negative id": (lambda s: changed(s, "input_ids", lambda x: put(x, -1)), ("sample 0 at position 0 is -1", "tokenizer")),
    "target too large": (lambda s: [{**x, "target_ids": x["input_ids"] + VOCAB} for x in s], ("target_ids of sample", "-100")),
    "overlong": (overlong, ("41 tokens", "max_tokens_per_mb = 40", "overlong='alone'")),
    "mixed keys": (lambda s: [s[0], {"input_ids": s[1]["input_ids"]}], ("samples 0 and 1", "same keys")),
    "mixed dtypes": (lambda s: changed(s, "advantages", Tensor.double), ("'advantages'", "torch.float64", "one dtype")),
    "mixed devices": (lambda s: changed(s, "advantages", lambda x: x.to("meta")), ("'advantages'", "on meta", "one device")),
    "mixed shapes": (lambda s: changed(s, "reward", lambda x: x[None]), ("'reward'", "neither per-token")),
    "text": (lambda s: [{**x, "prompt": "2 + 2"} for x in s], ("'prompt'", "a str", "'meta'")),
    "number as key": (lambda s: {**padded(s), 3: padded(s)["reward"]}, ("key 3", "strings")),
    "unknown shape": (lambda s: {**padded(s), "odd": torch.zeros(len(s) + 1)}, ("'odd'", "neither per-token")),
    "ambiguous": (lambda s: {**padded(s), "odd": torch.zeros_like(padded(s)["loss_mask"][:, 1:])}, ("'odd' is ambiguous", "per_sequence")),
    "short loss_mask": (lambda s: {**padded(s), "loss_mask": padded(s)["loss_mask"][:, 1:]}, ("'loss_mask'", "per-token")),
    "different meta": (lambda s: [{**x, "meta": {"step": i}} for i, x in enumerate(s)], ("'meta' of sample 1",)),
    "cold": (lambda s: [{**x, "temperature": torch.tensor(0.0)} for x in s], ("temperature",)),
    "temperature by token": (lambda s: [{**x, "temperature": torch.ones(len(x["input_ids"]))} for x in s], ("temperature",)),
    "temperature of two": (lambda s: {**padded(s), "temperature": torch.ones(len(s), 2)}, ("temperature",)),
}  # fmt: skip
"""Fault -> (input that replaces the valid samples, message of the error)."""


@pytest.mark.parametrize("backend", [*layouts(1, 2), *chosen("jax:d1", "jax:d2")])
def test_malformed_batch_on_one_rank_raises_on_all_ranks(backend: str) -> None:
    with twins(backend) as pair:
        for i, (name, (spoil, says)) in enumerate(BAD_BATCHES.items()):
            # Long enough for every fault, and equal on ranks with the same data-parallel shard.
            good = [sample for sample in pair.batch() if len(sample["input_ids"]) > 4]
            batch = spoil(good) if pair.is_guilty else good
            with raised(ValueError, *says, guilty=pair.guilty):
                BATCH_VERBS[i % len(BATCH_VERBS)](pair.engine, batch)
                pytest.fail(f"{name} was accepted")
            if i % 4 == 0:
                pair.check()
        pair.check()


@pytest.mark.parametrize("backend", [*layouts(2, but=("fsdp:d2",)), *chosen("jax:t2")])
def test_different_batches_in_one_dp_shard_raise(backend: str) -> None:
    with twins(backend) as pair:
        changes: dict[str, Callable[[list[Sample]], Any]] = {
            "another token": lambda s: changed(s, "input_ids", lambda x: put(x, (int(x[0]) + 1) % VOCAB)),
            "another advantage": lambda s: changed(s, "advantages", lambda x: put(x, 77.0)),
            "another order": lambda s: s[::-1],
            "another form": padded,
            "one sample fewer": lambda s: s[1:],
            "no sample": lambda s: [],
            "one key more": lambda s: [{**x, "more": x["reward"]} for x in s],
        }
        for name, change in changes.items():
            batch = change(pair.batch()) if pair.is_guilty else pair.batch()
            with raised(
                ValueError, f"ranks {pair.guilty - 1} and {pair.guilty} share", "shard the data by engine.dp_rank"
            ):
                pair.engine.train_batch(batch, loss)
                pytest.fail(f"{name} was not noticed")
        pair.check()


@pytest.mark.parametrize("backend", [*layouts(1, 2), *chosen("jax:d1", "jax:d2")])
def test_malformed_batch_keeps_pending_gradients(backend: str) -> None:
    with twins(backend) as pair:
        for engine in (pair.engine, pair.untouched):
            engine.forward_backward(pair.batch(), loss)
        with raised(ValueError, "the batch is a int", guilty=pair.guilty):
            pair.engine.forward_backward(7 if pair.is_guilty else pair.batch(1), loss)
        assert same_bits(gradients_of(pair.engine), gradients_of(pair.untouched))
        assert pair.engine.optimizer_step() == pair.untouched.optimizer_step()
        pair.check()


# ---- calls in an invalid order or with invalid arguments


@pytest.mark.parametrize("backend", [*layouts(1, 2), *chosen("jax:d1", "jax:d2")])
def test_calls_out_of_order_raise_and_change_nothing(backend: str) -> None:
    with twins(backend) as pair:
        engine, batch = pair.engine, pair.batch()
        with raised(RuntimeError, "no gradient is pending", "forward_backward()"):
            engine.optimizer_step()
        for each in (engine, pair.untouched):
            each.forward_backward(batch, loss)
        before = gradients_of(engine)
        with raised(RuntimeError, "pending gradients", "optimizer_step() or zero_grad()"):
            engine.train_batch(batch, loss)
        engine.eval_batch(batch, loss)
        engine.forward_batch(batch)
        assert same_bits(before, gradients_of(engine))
        assert engine.optimizer_step() == pair.untouched.optimizer_step()
        pair.check()


@pytest.mark.parametrize("backend", [*layouts(1, 2), *chosen("jax:d1", "jax:d2")])
def test_invalid_call_arguments_raise(backend: str) -> None:
    wrong: dict[str, dict[str, Any]] = {
        "normalization = 'mean'": {"normalization": "mean"},
        "normalization = 0": {"normalization": 0},
        "normalization = -2.0": {"normalization": -2.0},
        "normalization = inf": {"normalization": float("inf")},
        "loss_weight = nan": {"loss_weight": float("nan")},
        "outputs = ('logprob',)": {"outputs": ("logprob",)},
        "outputs = ()": {"outputs": ()},
        "value_head=True": {"outputs": ("values",)},
    }
    with twins(backend) as pair:
        for says, options in wrong.items():
            with raised(ValueError, says):
                pair.engine.forward_backward(pair.batch(), loss, **options)
        with raised(ValueError, "outputs = ('logits', 'bogus')"):
            pair.engine.forward_batch(pair.batch(), outputs=("logits", "bogus"))
        with raised(ValueError, "lr = nan"):
            pair.engine.set_lr(float("nan"))
        pair.check()


@pytest.mark.parametrize("backend", [*layouts(1, 2), *chosen("jax:d1", "jax:d2")])
def test_engine_without_optimizer_can_only_evaluate(backend: str) -> None:
    with started(backend, optimizer=None) as engine:
        batch = local_batch(engine, global_batch())
        for call in (lambda: engine.train_batch(batch, loss), lambda: engine.lr, lambda: engine.set_lr(0.1)):
            with raised(RuntimeError, "no optimizer", "OptimizerConfig"):
                call()
        first = engine.eval_batch(batch, loss)
        assert engine.eval_batch(batch, loss).loss == first.loss
        step = engine.forward_backward(batch, loss)
        assert step.loss == pytest.approx(first.loss, rel=1e-6)
        assert any(gradient.any() for gradient in gradients_of(engine).values())
        with raised(RuntimeError, "no optimizer"):
            engine.optimizer_step()
        engine.zero_grad()


@pytest.mark.world(1)
def test_calls_before_initialize_and_after_destroy_raise() -> None:
    engine = create_engine(config("fsdp:d1"))
    with raised(RuntimeError, "not initialized", "initialize(FinetuneSpec(...))"):
        engine.train_batch(global_batch(), loss)
    with started("fsdp:d1") as engine:
        engine.train_batch(global_batch(), loss)
    for call in (
        lambda: engine.train_batch(global_batch(), loss),
        lambda: engine.forward_batch(global_batch()),
        engine.zero_grad,
    ):
        with raised(RuntimeError, "destroyed", "make another"):
            call()


# ---- weights


def weighing(guilty: bool, wrong: Callable[[Batch], Any]) -> Callable[[Batch], Any]:
    return wrong if guilty else default_loss_weight


@pytest.mark.parametrize("backend", [*layouts(1, 2), *chosen("jax:d1", "jax:d2")])
def test_invalid_loss_weight_on_one_rank_raises_on_all_ranks(backend: str) -> None:
    bad: dict[str, tuple[Callable[[Batch], Any], type[Exception], tuple[str, ...]]] = {
        "raises": (explode, RuntimeError, ("KeyError", "no such column")),
        "negative": (lambda b: -b["loss_mask"].sum() - 1, ValueError, ("'loss'", "micro-batch 0", "at least 0")),
        "nan": (lambda b: b["loss_mask"].sum() * torch.nan, ValueError, ("returned nan", "finite")),
        "not a scalar": (lambda b: b["loss_mask"], ValueError, ("shape (", "scalar tensor")),
        "not a tensor": (lambda b: 3.0, ValueError, ("float", "scalar tensor")),
    }
    with twins(backend) as pair:
        for name, (weight_fn, kind, says) in bad.items():
            with raised(kind, *says, guilty=pair.guilty):
                pair.engine.train_batch(pair.batch(), loss, weighing(pair.is_guilty, weight_fn))
                pytest.fail(f"{name} was accepted")
        pair.check()
        if world().size > 1:
            with raised(ValueError, "different terms on different ranks"):
                as_dict = weighing(pair.is_guilty, lambda b: {"policy": b["loss_mask"].sum()})
                pair.engine.train_batch(pair.batch(), loss, as_dict)
            pair.check()


@pytest.mark.parametrize("backend", [*layouts(1, 2), *chosen("jax:d1", "jax:d2")])
def test_zero_global_weight_raises_on_every_rank(backend: str) -> None:
    with twins(backend) as pair:
        weightless = [{**sample, "loss_mask": sample["loss_mask"] * 0} for sample in pair.batch()]
        for verb in (pair.engine.train_batch, pair.engine.eval_batch):
            with raised(ValueError, "global loss weight is 0 over all ranks", "'loss'", "skip this batch"):
                verb(weightless, loss)
        with raised(ValueError, "'drift'"):
            pair.engine.train_batch(
                pair.batch(),
                lambda out, b: {"policy": loss(out, b), "drift": out.logprobs.sum()},
                lambda b: {"policy": b["loss_mask"].sum(), "drift": 0.0 * b["loss_mask"].sum()},
            )
        with raised(ValueError, "global loss weight is 0"):
            pair.engine.global_weight(pair.engine.microbatches(weightless))
        pair.check()


@pytest.mark.parametrize("backend", layouts(4, but=("megatron:t2p2",), also=("megatron:d2p2",)))
def test_loss_is_not_called_on_rank_without_weight(backend: str) -> None:
    with started(backend) as engine:
        calls = 0

        def counting(out: TokenOutputs, batch: Batch) -> Tensor:
            nonlocal calls
            calls += 1
            return loss(out, batch)

        batch = local_batch(engine, global_batch())
        weightless = engine.dp_rank == engine.dp_size - 1 and engine.dp_size > 1
        if weightless:
            batch = [{**sample, "loss_mask": sample["loss_mask"] * 0} for sample in batch]
        step = engine.train_batch(batch, counting)
        assert step.update_successful
        has_losses = engine.mesh["pp"].get_local_rank() == engine.dims.pp - 1
        assert (calls > 0) == (has_losses and not weightless)
        assert step.n_tokens == sum(len(sample["input_ids"]) for sample in global_batch())


# ---- process functions of the caller


@pytest.mark.parametrize("backend", layouts(1, 2, also=("megatron:d2",)))
def test_process_function_error_on_one_rank_raises_on_all_ranks(backend: str) -> None:
    def process(outputs: TokenOutputs, mb: MicroBatch) -> tuple[Tensor, int]:
        return loss(outputs, mb.data), mb.index

    wrong: dict[str, tuple[Callable[[TokenOutputs, MicroBatch], Any], type[Exception], tuple[str, ...]]] = {
        "raises": (explode, RuntimeError, ("KeyError", "no such column")),
        "raises late": (lambda o, mb: process(o, mb) if mb.index == 0 else explode(), RuntimeError, ("KeyError",)),
        "no pair": (lambda o, mb: loss(o, mb.data), RuntimeError, ("TypeError",)),
        "no graph": (lambda o, mb: (o.logprobs.detach().sum(), 0), ValueError, ("micro-batch 0", "no graph")),
        "vector": (lambda o, mb: (o.logprobs, 0), ValueError, ("micro-batch 0", "not a scalar", "sum")),
        "number": (lambda o, mb: (1.5, 0), ValueError, ("not a scalar tensor",)),
    }  # fmt: skip
    with twins(backend, mb_spec=MicroBatchSpec(n_mbs=2)) as pair:
        for name, (function, kind, says) in wrong.items():
            mbs = pair.engine.microbatches(pair.batch())
            with raised(kind, *says, DISCARDED, guilty=pair.guilty):
                pair.engine.forward_backward_batch(mbs, function if pair.is_guilty else process)
                pytest.fail(f"{name} was accepted")
        pair.check()
        mbs = pair.engine.microbatches(pair.batch())
        with raised(RuntimeError, "KeyError", guilty=pair.guilty):
            pair.engine.forward_backward_batch(mbs, explode if pair.is_guilty else process, forward_only=True)
        assert pair.engine.forward_backward_batch(mbs, process, forward_only=True) == list(range(len(mbs.real)))
        pair.check()
