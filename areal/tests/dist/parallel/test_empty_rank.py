"""Data-parallel ranks without samples, outside the grid: outputs of every kind, custom loops, dropped samples, experts and errors."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from areal.api import Batch, MicroBatchSpec, TokenOutputs, TopK, TrainEngine
from areal.tests.grid.cases import as_input, rows
from areal.tests.grid.cell_engine import start_cell
from areal.tests.grid.compare import assert_number, assert_rows, assert_tensors
from areal.tests.grid.layouts import LORA, Cell, Layout
from areal.tests.harness.references.moe_reference import TOLERANCE, assert_terms, moe_reference, recorded, with_replay
from areal.tests.harness.tiny import BATCH_VERBS, Sample, chosen, global_batch, gradients_of, loss, same_bits, started
from areal.tests.harness.world import world


def idle(engine: TrainEngine, everything: list[Sample], empty: int = -1) -> list[Sample]:
    """Return this rank's samples: none on data-parallel rank ``empty``, and a slice of the global batch on the others."""
    empty %= engine.dp_size
    if engine.dp_rank == empty:
        return []
    return everything[(engine.dp_rank - (engine.dp_rank > empty)) :: engine.dp_size - 1]


def same_text(text: str) -> None:
    """Check that all ranks have this text."""
    texts: list[Any] = [None] * world().size
    dist.all_gather_object(texts, text)
    assert len(set(texts)) == 1, texts


# ---- outputs

OUTPUTS = ("logprobs", "entropy", "logits", "hidden", TopK(3))


@pytest.mark.parametrize("backend", chosen("fsdp:d2", "megatron:d2", "fsdp:d2p2", "fsdp:d2c2", "megatron:d2p2"))
def test_outputs_of_an_empty_rank_have_the_form_of_the_batch(backend: str) -> None:
    everything = global_batch()
    with started(backend) as engine:
        for empty in (0, 1):
            samples = idle(engine, everything, empty)
            mine, lengths = engine.dp_rank == empty, [len(sample["input_ids"]) for sample in samples]
            # One output, and a dict of several, as lists.
            restored = engine.forward_batch(samples)
            assert restored == [] if mine else [len(row) for row in restored] == lengths
            restored = engine.forward_batch(samples, outputs=OUTPUTS)
            assert list(restored) == ["logprobs", "entropy", "logits", "hidden", "topk"]
            assert restored["topk"]._fields == ("logprobs", "ids")
            if mine:
                assert restored == {"logprobs": [], "entropy": [], "logits": [], "hidden": [], "topk": ([], [])}
            # A padded batch [0, S] has outputs [0, S, ...] of the dtypes and trailing shapes of the other ranks.
            padded = engine.forward_batch(as_input(samples, "padded", like=everything[0]), outputs=OUTPUTS)
            width = padded["logprobs"].shape[1]
            assert width == max(lengths, default=0) + 2
            assert padded["logprobs"].shape == (len(samples), width)
            assert padded["logits"].shape == (len(samples), width, 112)
            assert padded["hidden"].shape == (len(samples), width, 32)
            assert padded["topk"].ids.shape == (len(samples), width, 3)
            assert padded["topk"].ids.dtype == torch.int64
            assert padded["logprobs"].dtype == padded["hidden"].dtype == torch.float32


@pytest.mark.parametrize(
    "backend",
    chosen(
        "fsdp:d2",
        "megatron:d2",
        "fsdp:d2p2",
    ),
)
def test_rank_whose_samples_are_all_dropped_has_outputs_of_zeros(backend: str) -> None:
    """As a rank without samples, but for the outputs: the loss, and the gradients, are those of the other ranks' samples."""
    everything = [sample for sample in global_batch() if len(sample["input_ids"]) > 1]
    short, long = ([s for s in everything if (len(s["input_ids"]) > 15) == over] for over in (False, True))
    targets = [{**sample, "target_ids": sample["input_ids"][:, None].expand(-1, 2)} for sample in everything]
    spec = {"max_tokens_per_mb": 15, "overlong": "drop"}
    with started(backend, mb_spec=spec) as engine:
        samples = long if engine.dp_rank == 0 else short
        restored = engine.forward_batch(samples, outputs=("logprobs", "hidden"))
        assert [len(row) for row in restored["logprobs"]] == [len(sample["input_ids"]) for sample in samples]
        assert all(row.shape[1:] == (32,) for row in restored["hidden"])
        assert any(row.any() for row in restored["logprobs"]) == (engine.dp_rank == 1)
        # K targets at each position: the shape is that of the other rank.
        mine = [sample for sample in targets if (len(sample["input_ids"]) > 15) == (engine.dp_rank == 0)]
        assert all(
            row.shape == (len(s["input_ids"]), 2) for row, s in zip(engine.forward_batch(mine), mine, strict=True)
        )
        # The step is that of a rank without samples.
        dropped = engine.forward_backward(samples, loss)
        assert dropped.metrics["dropped_sequences"] == len(long)
        gradients = gradients_of(engine)
        engine.zero_grad()
        step = engine.forward_backward([] if engine.dp_rank == 0 else short, loss)
        assert (step.loss, step.n_tokens) == (dropped.loss, dropped.n_tokens)
        assert same_bits(gradients, gradients_of(engine))
        # If every sample of the global batch is dropped, the error says so.
        engine.zero_grad()
        with pytest.raises(
            ValueError, match=f"empty batch: all {2 * len(long)} sequences of the global batch were dropped"
        ) as raised:
            engine.train_batch(long, loss)
        same_text(str(raised.value))


# ---- steps


@pytest.mark.parametrize(
    "backend",
    chosen("fsdp:d2", "fsdp:r2", "megatron:d2", "fsdp:d2t2", "megatron:d2p2"),
)
@pytest.mark.parametrize("lora", [False, True])
def test_calls_with_another_empty_rank_each_accumulate(backend: str, lora: bool) -> None:
    """Gradients of calls with different empty ranks add up to those of one call without any, adapters included."""
    batches, outputs = [global_batch(seed) for seed in (0, 1)], ("logprobs", "entropy")

    # The entropy of a filler has a gradient, unlike its log-prob, which is without a target.
    def policy(out: TokenOutputs, batch: Batch) -> Tensor:
        return loss(out, batch) - 0.1 * (out.entropy * batch["loss_mask"]).sum()

    with started(backend, lora=LORA if lora else None) as engine:
        for empty, everything in enumerate(batches):
            mine = idle(engine, everything, empty)
            step = engine.forward_backward(mine, policy, outputs=outputs, normalization="sum")
            assert step.n_tokens == sum(len(sample["input_ids"]) for sample in everything)
        split = gradients_of(engine)
        engine.zero_grad()
        together = [sample for everything in batches for sample in everything]
        mine = together[engine.dp_rank :: engine.dp_size]
        engine.forward_backward(mine, policy, outputs=outputs, normalization="sum")
        assert_tensors(split.items(), {name: x.double() for name, x in gradients_of(engine).items()}, 1e-4)
        # An evaluation with an empty rank keeps them.
        before = gradients_of(engine)
        engine.eval_batch(idle(engine, batches[0]), loss)
        engine.forward_batch(idle(engine, batches[0]))
        assert same_bits(before, gradients_of(engine))


@pytest.mark.parametrize("backend", chosen("fsdp:d2", "megatron:d2", "fsdp:d2c2", "megatron:d2p2"))
def test_custom_loop_on_an_empty_rank(backend: str) -> None:
    """Fillers of the empty rank have the keys of the other ranks, and reach no function of the user."""
    keys = {"bonus": torch.ones(2, 3, dtype=torch.int32), "temperature": torch.tensor(0.5), "image": torch.ones(4, 2)}
    everything = [sample | keys | {"output_mask": sample["loss_mask"] != 0} for sample in global_batch()]
    spec = MicroBatchSpec(max_tokens_per_mb=40, payloads=("image",))
    with started(backend, mb_spec=spec) as engine:
        samples = idle(engine, everything, 0)
        mbs = engine.microbatches(samples)
        assert (mbs.real == ()) == (engine.dp_rank == 0)
        described = [
            {key: (x.dtype, tuple(x.shape[1:])) for key, x in mb.data.items() if isinstance(x, Tensor)} for mb in mbs
        ]
        assert all(each == described[0] for each in described)
        everyones: list[Any] = [None] * world().size
        dist.all_gather_object(everyones, described[0])
        assert all(each == everyones[-1] for each in everyones)
        assert described[0]["bonus"] == (torch.int32, (2, 3))
        if engine.dp_rank == 0:
            assert mbs[0].data["image"][0].shape == (0, 2)
        weight = engine.global_weight(mbs)
        assert weight == pytest.approx(sum(float(sample["loss_mask"][:-1].sum()) for sample in everything))
        seen: list[int] = []

        def process(outputs: TokenOutputs, mb: Any) -> tuple[Tensor, Tensor]:
            seen.append(mb.index)
            return loss(outputs, mb.data) / weight, outputs.logprobs.detach()

        results = engine.forward_backward_batch(mbs, process)
        assert sorted(seen) == [mb.index for mb in mbs.real] or engine.dims.pp > 1
        assert [len(row) for row in mbs.restore(results)] == [len(sample["input_ids"]) for sample in samples]
        by_hand = gradients_of(engine)
        engine.zero_grad()
        engine.forward_backward(samples, loss)
        assert_tensors(by_hand.items(), {name: x.double() for name, x in gradients_of(engine).items()}, 1e-5)


# ---- experts

MOE = {"moe": {"aux_loss": 0.5, "z_loss": 0.25, "statistics": True}}


@pytest.mark.parametrize(
    "backend",
    chosen("fsdp:e2", "megatron:e2", "fsdp:d2", "megatron:d2", "fsdp:d2e2", "fsdp:e2p2", "megatron:e2t2"),
)
def test_experts_with_an_empty_rank(backend: str) -> None:
    """Balancing losses, load, replay and recording count the samples of the other ranks, and no filler."""
    cell = Cell(Layout(backend, "", MOE), "qwen3_moe", "nll", "ragged", "tokens24", empty_rank="first")
    call, experts = (cell.objective.loss_fn, cell.objective.weight_fn), recorded(cell.case.lengths)
    with start_cell(cell) as run:
        engine, expected, lengths = run.engine, moe_reference(cell), [cell.case.lengths[i] for i in run.local_indices]
        step = engine.train_batch(run.batch(), *call)
        assert_terms(step, expected)
        assert_number(step.grad_norm, expected.grad_norm, TOLERANCE)
        assert step.metrics["moe/idle_experts"] == (expected.load == 0).sum()
        replayed, batch = moe_reference(cell, replay=experts), with_replay(run, experts)
        assert_rows(rows(engine.forward_batch(batch), lengths), replayed.logprobs, run.local_indices, TOLERANCE)
        assert_terms(engine.forward_backward(batch, *call), replayed)
        assert_tensors(engine.named_gradients(), replayed.gradients, TOLERANCE)
        if engine.dims.pp == 1:
            actual = rows(engine.forward_batch(run.batch(), outputs=("routed_experts",)), lengths)
            assert all(torch.equal(row, expected.experts[i]) for row, i in zip(actual, run.local_indices, strict=True))


# ---- errors


@pytest.mark.parametrize(
    "backend",
    chosen(
        "fsdp:d1",
        "fsdp:d2",
        "fsdp:c2",
        "megatron:d2",
        "megatron:p2",
        "megatron:d1",
        "fsdp:d2c2",
        "megatron:t2p2",
    ),
)
def test_empty_global_batch_raises_one_error_and_changes_nothing(backend: str) -> None:
    everything = global_batch()
    with started(backend) as engine:
        samples = everything[engine.dp_rank :: engine.dp_size]
        engine.forward_backward(samples, loss)
        before = gradients_of(engine)
        for verb in BATCH_VERBS[1:]:
            for nothing in ([], as_input([], "padded", like=everything[0])):
                with pytest.raises(ValueError, match=re.escape("empty batch: no rank has a sample")) as raised:
                    verb(engine, nothing)
                same_text(str(raised.value))
        # Pending gradients are unchanged, and the engine goes on.
        assert same_bits(before, gradients_of(engine))
        engine.optimizer_step()
        with pytest.raises(ValueError, match="empty batch"):
            BATCH_VERBS[0](engine, [])
        assert engine.train_batch(samples, loss).update_successful


@pytest.mark.parametrize("backend", chosen("fsdp:d2", "megatron:d2"))
def test_error_beside_an_empty_rank_raises_on_both(backend: str) -> None:
    def broken(outputs: TokenOutputs, batch: Batch) -> Tensor:
        raise KeyError("advantages")

    with started(backend) as engine:
        samples = idle(engine, global_batch(), 0)
        with pytest.raises(ValueError, match="rank 1: the batch is a int"):
            engine.train_batch(samples if engine.dp_rank == 0 else 7, loss)
        with pytest.raises(RuntimeError, match="rank 1: KeyError"):
            engine.train_batch(samples, broken)
        # The rank with samples may be without a loss weight, too.
        with pytest.raises(ValueError, match="global loss weight is 0"):
            engine.train_batch([sample | {"loss_mask": sample["loss_mask"] * 0} for sample in samples], loss)
        assert engine.train_batch(samples, loss).update_successful
