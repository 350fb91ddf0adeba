"""A loss that reads no output of a head: its rank reduces the gradients of that head when the others do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from areal.api import Batch, TokenOutputs
from areal.engine.faults import reach_all_heads
from areal.tests.grid.models import model_dir
from areal.tests.harness.tiny import layout, loss, started, uneven_batch

BOTH = ("logprobs", "values")


def of_values(out: TokenOutputs, batch: Batch) -> Tensor:
    assert out.values is not None
    return (out.values * batch["loss_mask"]).square().sum()


def of_both(out: TokenOutputs, batch: Batch) -> Tensor:
    assert out.logprobs is not None
    return of_values(out, batch) + 0 * out.logprobs.sum()


def of_logprobs_and_values(out: TokenOutputs, batch: Batch) -> Tensor:
    assert out.values is not None
    return loss(out, batch) + 0 * out.values.sum()


@pytest.mark.parametrize(
    ("backend", "grad_sync"),
    [
        layout("fsdp:d2", "micro_batch"),
        layout("fsdp:d2", "call"),
        layout("megatron:d2", "auto"),
        layout("jax:d2", "auto"),
    ],
)
def test_losses_that_read_one_head_train_on_ranks_that_fill_up(backend: str, grad_sync: str) -> None:
    """The first rank has one sequence, and fills up with micro-batches that reach both heads."""
    changes = {"value_head": True, "mb_spec": {"samples_per_mb": 1}, "grad_sync": grad_sync}
    found = []
    for functions in ((of_both, of_logprobs_and_values), (of_values, loss)):
        with started(backend, path=model_dir("qwen3"), **changes) as engine:
            batch = uneven_batch(engine)
            steps = [engine.train_batch(batch, function, outputs=BOTH, returns=BOTH) for function in functions]
            found.append([(step.loss, step.grad_norm) for step in steps])
    assert found[0] == found[1]


def gradients(loss: Tensor | None, *outputs: Tensor) -> list[Tensor | None]:
    assert loss is not None
    return list(torch.autograd.grad(loss, outputs, allow_unused=True))


def test_gradient_of_an_unread_head_is_zero() -> None:
    hidden = torch.ones(5, requires_grad=True)
    logprobs, entropy, values = (hidden * factor for factor in (2.0, 3.0, torch.inf))
    outputs = TokenOutputs(logprobs=logprobs, entropy=entropy, values=values, hidden=hidden)

    def read(*names: str) -> list[Tensor | None]:
        loss = torch.stack([getattr(outputs, name) for name in names]).sum()
        return gradients(reach_all_heads(loss, outputs), logprobs, entropy, values)

    one, zero = torch.ones(5), torch.zeros(5)
    # One output of a head is enough, and hidden states are of none.
    assert same(read("logprobs"), [one, None, zero])
    assert same(read("entropy"), [None, one, zero])
    assert same(read("values", "entropy"), [None, one, one])
    assert same(read("hidden"), [zero, None, zero])


def same(found: list[Tensor | None], expected: list[Tensor | None]) -> bool:
    return all(
        x is y or (x is not None and y is not None and torch.equal(x, y)) for x, y in zip(found, expected, strict=True)
    )


def test_a_loss_that_reads_all_heads_stays() -> None:
    hidden = torch.randn(5, requires_grad=True)
    logprobs, values = hidden * 2, hidden.detach() * 3
    read = logprobs.exp().sum()
    assert reach_all_heads(read, TokenOutputs(logprobs=logprobs, values=values)) is read
    assert reach_all_heads(None, TokenOutputs(logprobs=logprobs)) is None


def test_outputs_that_are_leaves_are_found() -> None:
    logprobs, values = (torch.randn(5, requires_grad=True) for _ in range(2))
    outputs = TokenOutputs(logprobs=logprobs, values=values)
    assert [x is None for x in gradients(reach_all_heads(values.sum(), outputs), logprobs, values)] == [False, False]
