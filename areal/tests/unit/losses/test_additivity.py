"""Loss functions that are not sums are named, once, and whatever they do on parts of a micro-batch ends no step."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from areal.api import Batch, LossFn, TokenOutputs, default_loss_weight
from areal.engine.loss_call import AdditivityProbe

LENGTHS = (3, 5, 2)


def micro_batch(*trained: int, lengths: tuple[int, ...] = LENGTHS) -> tuple[TokenOutputs, Batch]:
    """Return outputs and a micro-batch in which these sequences are trained; all of them without names."""
    total, ends = sum(lengths), torch.tensor(lengths).cumsum(0)
    mask = torch.zeros(total)
    for number in trained or range(len(lengths)):
        mask[ends[number] - lengths[number] : ends[number]] = 1.0
    values: dict[str, Any] = {
        "loss_mask": mask,
        "reward": torch.arange(1.0, len(lengths) + 1),
        "extra": [torch.ones(n) for n in lengths],
    }
    cu_seqlens = torch.tensor([0, *ends.tolist()], dtype=torch.int32)
    generator = torch.Generator().manual_seed(0)
    logprobs = -torch.rand(total, generator=generator).requires_grad_()
    return TokenOutputs(logprobs=logprobs), Batch(values, cu_seqlens, {"scale": 2.0})


def probed(*losses: LossFn, batches: Any = None) -> None:
    """Call loss functions as the steps of one engine do."""
    probe = AdditivityProbe()
    for outputs, batch in batches or [micro_batch()] * 3:
        for loss in losses:
            watched = probe.watching(loss, default_loss_weight)
            assert str(watched(outputs, batch)) == str(loss(outputs, batch))


def total(out: TokenOutputs, batch: Batch, scale: float = 1.0) -> Tensor:
    return -(out.logprobs * batch["loss_mask"]).sum() * scale


def per_sequence(out: TokenOutputs, batch: Batch) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return two terms and a metric that is no sum, from keys of every kind."""
    lengths = batch.cu_seqlens.diff()
    rewards = batch["reward"].repeat_interleave(lengths)
    assert [len(each) for each in batch["extra"]] == lengths.tolist()
    terms = {"policy": total(out, batch) * batch.meta["scale"], "value": (out.logprobs * rewards).sum()}
    return terms, {"mean": out.logprobs.mean()}


@pytest.mark.parametrize(
    "loss", [total, per_sequence, functools.partial(total, scale=3.0), lambda o, b: total(o, b) * 0]
)
def test_sums_are_not_named(loss: LossFn, caplog: pytest.LogCaptureFixture) -> None:
    probed(loss)
    assert not caplog.records


@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        (lambda o, b: total(o, b) / b["loss_mask"].sum(), "It is probably a mean."),
        (functools.partial(lambda o, b, by: total(o, b) / len(o.logprobs) ** by, by=1), "It is probably a mean."),
        (lambda o, b: (total(o, b) + 7.0, {}), ""),
        (lambda o, b: {"a": total(o, b), "b": total(o, b).square()}, "(term 'b')"),
    ],
)
def test_others_are_named_once(loss: LossFn, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    probed(loss, total)
    (record,) = caplog.records
    assert ("probably" in record.getMessage()) == ("probably" in kind)
    assert "term" not in kind or kind in record.getMessage()


def test_function_that_is_defined_in_each_step_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    probe = AdditivityProbe()
    for _ in range(3):
        outputs, batch = micro_batch()
        probe.watching(lambda o, b: o.logprobs.mean(), default_loss_weight)(outputs, batch)
    assert len(caplog.records) == 1


def test_micro_batches_that_cannot_be_divided_are_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    """A loss is never called without a weight. Where a sequence has one token, keys cannot be told apart."""
    calls: list[int] = []

    def mean(out: TokenOutputs, batch: Batch) -> Tensor:
        assert batch["loss_mask"].sum() > 0
        calls.append(len(out.logprobs))
        return total(out, batch) / batch["loss_mask"].sum()

    whole = [micro_batch(lengths=(10,)), micro_batch(0), micro_batch(lengths=(1, 1))]
    probed(mean, batches=whole)
    assert (calls, caplog.records) == ([10, 10, 10, 10, 2, 2], [])
    probed(mean, batches=[*whole, micro_batch(0, 2)])
    assert calls[-4:] == [3, 7, 10, 10]
    assert len(caplog.records) == 1


def test_loss_that_fails_on_parts_ends_no_step(caplog: pytest.LogCaptureFixture) -> None:
    def whole_only(out: TokenOutputs, batch: Batch) -> Tensor:
        if len(out.logprobs) < sum(LENGTHS):
            raise KeyError("a part")
        return total(out, batch)

    probed(whole_only)
    assert not caplog.records


def test_loss_that_changes_its_arguments_in_place_is_computed_as_without_a_probe(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def in_place(out: TokenOutputs, batch: Batch) -> Tensor:
        batch["extra"][0].mul_(3)
        difference = out.logprobs.sub_(batch["loss_mask"].mul_(2))
        return (difference * difference).sum()

    found = []
    for function in (in_place, AdditivityProbe().watching(in_place, default_loss_weight)):
        outputs, batch = micro_batch()
        leaf = outputs.logprobs.detach().requires_grad_()
        logprobs = leaf * 1.0
        function(TokenOutputs(logprobs=logprobs), batch).backward()
        found.append([leaf.grad, logprobs, batch["loss_mask"], *batch["extra"]])
    assert all(map(torch.equal, *found))
    assert not caplog.records


def test_objectives_of_the_library_are_not_called_again() -> None:
    calls = []

    def loss(out: TokenOutputs, batch: Batch) -> Tensor:
        calls.append(out)
        return out.logprobs.mean()

    loss.needs_weight_fn = True  # type: ignore[attr-defined]
    watched = AdditivityProbe().watching(loss, default_loss_weight)
    assert watched is loss
    watched(*micro_batch())
    assert len(calls) == 1


def test_next_random_numbers_are_those_of_a_rank_that_does_not_probe() -> None:
    """Tensor-parallel ranks compute the same loss, and one of them probes."""

    def loss(out: TokenOutputs, batch: Batch) -> Tensor:
        return (out.logprobs * torch.rand(len(out.logprobs))).sum()

    found = []
    for function in (loss, AdditivityProbe().watching(loss, default_loss_weight)):
        torch.manual_seed(1)
        found.append([str(function(*micro_batch())) for _ in range(3)])
    assert found[0] == found[1]
