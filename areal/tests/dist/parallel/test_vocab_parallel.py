"""Vocabulary-parallel head: on every rank the numbers equal those of the full head, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from areal.api import IGNORE_INDEX
from areal.utils.functional import HeadOutputs, HeadUpdate, head_outputs, logits

T, V, H = 11, 40, 6
EVEN, UNEVEN = "even", "uneven"


def make(dtype: torch.dtype, columns: int | None, seed: int = 3) -> tuple[Tensor, ...]:
    rng = torch.Generator().manual_seed(seed)
    hidden = torch.randn(T, H, generator=rng, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(V, H, generator=rng, dtype=torch.float64).to(dtype).requires_grad_()
    bias = torch.randn(V, generator=rng, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(0, V, (T,) if columns is None else (T, columns), generator=rng)
    targets[4] = IGNORE_INDEX
    temperature = torch.rand(T, generator=rng, dtype=torch.float64) + 0.5
    return hidden, weight, bias, targets, temperature


def block(split: str, group: dist.ProcessGroup) -> slice:
    """Return this rank's rows; with ``uneven`` the first rank has more."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    first = V // ranks + (ranks - 1 if split == UNEVEN else 0)
    rest = (V - first) // (ranks - 1)
    bounds = [0, first, *(first + rest * i for i in range(1, ranks - 1)), V]
    return slice(bounds[rank], bounds[rank + 1])


def tensors(out: HeadOutputs) -> list[Tensor]:
    return [x for x in (out.logprobs, out.entropy, *(out.topk or ())) if x is not None]


def scalar(out: list[Tensor]) -> Tensor:
    tensors = [x for x in out if x.is_floating_point()]
    return torch.stack(
        [(x * torch.cos(torch.arange(x.numel(), dtype=x.dtype)).view(x.shape)).sum() for x in tensors]
    ).sum()


def same_on_all_ranks(x: Tensor, group: dist.ProcessGroup) -> bool:
    copies = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(copies, x.detach().contiguous(), group=group)
    return all(torch.equal(copy, x) for copy in copies)


def check(
    leaves: tuple[Tensor, ...], rows: slice, got: list[Tensor], want: list[Tensor], tol: float, group: dist.ProcessGroup
) -> None:
    """Compare outputs and gradients with the full head's; ``leaves`` belong to the full head, those of the shard are views."""
    for g, w in zip(got, want, strict=True):
        assert same_on_all_ranks(g, group)
        torch.testing.assert_close(g, w, rtol=tol, atol=tol)
    expected = torch.autograd.grad(scalar(want), leaves, retain_graph=True)
    actual = torch.autograd.grad(scalar(got), leaves, retain_graph=True)
    assert same_on_all_ranks(actual[0], group)
    torch.testing.assert_close(actual[0], expected[0], rtol=tol, atol=tol)
    for g, e in zip(actual[1:], expected[1:], strict=True):
        torch.testing.assert_close(g[rows], e[rows], rtol=tol, atol=tol)
        assert int(g.abs().sum(dim=tuple(range(1, g.ndim))).count_nonzero()) <= rows.stop - rows.start


@pytest.mark.world(2, 4)
@pytest.mark.parametrize("split", [EVEN, UNEVEN])
@pytest.mark.parametrize(
    ("columns", "entropy", "topk"), [(None, False, None), (None, True, 5), (3, True, None), (3, False, 2)]
)
@pytest.mark.parametrize("chunk_size", [4, None])
def test_vocab_parallel_head_equals_full_head(
    columns: int | None, entropy: bool, topk: int | None, chunk_size: int | None, split: str
) -> None:
    group = dist.group.WORLD
    hidden, weight, bias, targets, temperature = make(torch.float64, columns)
    options: dict[str, Any] = {"entropy": entropy, "topk": topk, "chunk_size": chunk_size}
    rows = block(split, group)
    for softcap, temp in ((None, 1.0), (2.0, temperature)):
        options |= {"softcap": softcap, "temperature": temp, "logit_scale": 1.5}
        want = tensors(head_outputs(hidden, weight, targets, bias=bias, **options))
        got = tensors(head_outputs(hidden, weight[rows], targets, bias=bias[rows], group=group, **options))
        check((hidden, weight, bias), rows, got, want, 1e-12, group)


@pytest.mark.world(2, 4)
@pytest.mark.parametrize("split", [EVEN, UNEVEN])
def test_vocab_parallel_update_equals_full_update(split: str) -> None:
    """The gradient of ``down`` is complete on every rank, and equal bit for bit."""
    group = dist.group.WORLD
    hidden, weight, _, targets, _ = make(torch.float64, 3)
    rng = torch.Generator().manual_seed(5)
    down, up = (torch.randn(size, generator=rng, dtype=torch.float64).requires_grad_() for size in ((2, H), (V, 2)))
    rows = block(split, group)
    frozen, update, mine = weight.detach(), HeadUpdate(down, up, 0.75), HeadUpdate(down, up[rows], 0.75)
    options: dict[str, Any] = {"entropy": True, "topk": 2, "chunk_size": 4}
    for want, got in (
        (
            tensors(head_outputs(hidden, frozen, targets, update=update, **options)),
            tensors(head_outputs(hidden, frozen[rows], targets, update=mine, group=group, **options)),
        ),
        ([logits(hidden, frozen, update=update)], [logits(hidden, frozen[rows], update=mine, group=group)]),
    ):
        check((down, up), rows, got, want, 1e-12, group)
        check((hidden,), rows, got, want, 1e-12, group)


@pytest.mark.world(2, 4)
@pytest.mark.parametrize("fp32", [False, True])
def test_vocab_parallel_head_with_missing_targets_and_bf16(fp32: bool) -> None:
    """Rounded to bf16, logits tie, and the order of ties is undefined: top-k is compared for the float32 head only."""
    group = dist.group.WORLD
    hidden, weight, bias, _, _ = make(torch.bfloat16, None)
    rows = block(EVEN, group)
    options: dict[str, Any] = {"entropy": True, "topk": 3 if fp32 else None, "fp32": fp32}
    want = tensors(head_outputs(hidden, weight, None, bias=bias, **options))
    got = tensors(head_outputs(hidden, weight[rows], None, bias=bias[rows], group=group, **options))
    assert got[0].dtype == torch.float32
    check((hidden, weight, bias), rows, got, want, 2e-2, group)


@pytest.mark.world(2, 4)
def test_vocab_parallel_head_without_targets_or_tokens() -> None:
    group = dist.group.WORLD
    hidden, weight, _, targets, _ = make(torch.float64, None)
    rows = block(EVEN, group)
    for tokens, options in ((T, {}), (T, {"entropy": True}), (0, {}), (0, {"entropy": True, "topk": 2})):
        leaf = hidden[:tokens]
        asked = torch.full_like(targets[:tokens], IGNORE_INDEX)
        out = head_outputs(leaf, weight[rows], asked, group=group, **options).logprobs
        assert torch.equal(out, torch.zeros(tokens, dtype=torch.float64))
        for grad in torch.autograd.grad(out.sum(), (leaf, weight)):
            assert not grad.any()


@pytest.mark.world(2, 4)
def test_vocab_parallel_head_with_probability_on_one_rank() -> None:
    """The probabilities of the other ranks underflow and must not turn into NaN."""
    group = dist.group.WORLD
    hidden, weight, bias, targets, _ = make(torch.float32, None)
    rows = block(EVEN, group)
    tilt = torch.zeros(V).index_fill_(0, torch.arange(5), 400.0)
    want = tensors(head_outputs(hidden, weight, targets, bias=bias + tilt, entropy=True, topk=2))
    got = tensors(
        head_outputs(hidden, weight[rows], targets, bias=(bias + tilt)[rows], entropy=True, topk=2, group=group)
    )
    assert all(bool(x.isfinite().all()) for x in got)
    check((hidden, weight, bias), rows, got, want, 1e-4, group)


@pytest.mark.world(2, 4)
@pytest.mark.parametrize("split", [EVEN, UNEVEN])
def test_gathered_logits_equal_full_logits(split: str) -> None:
    group = dist.group.WORLD
    hidden, weight, bias, _, temperature = make(torch.float64, None)
    rows = block(split, group)
    options: dict[str, Any] = {"temperature": temperature, "softcap": 3.0}
    want = [logits(hidden, weight, bias=bias, **options)]
    got = [logits(hidden, weight[rows], bias=bias[rows], group=group, **options)]
    check((hidden, weight, bias), rows, got, want, 1e-12, group)


@pytest.mark.world(4)
def test_separate_vocab_groups_do_not_mix() -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group_index = dist.get_rank() // 2
    hidden, weight, bias, targets, _ = make(torch.float64, None, seed=group_index)
    rows = block(EVEN, groups[group_index])
    want = tensors(head_outputs(hidden, weight, targets, bias=bias, entropy=True))
    got = tensors(
        head_outputs(
            hidden,
            weight[rows],
            targets,
            bias=bias[rows],
            entropy=True,
            chunk_size=3 + group_index,
            group=groups[group_index],
        )
    )
    check((hidden, weight, bias), rows, got, want, 1e-12, groups[group_index])


@pytest.mark.world(2, 4)
def test_target_outside_vocabulary_raises_on_every_rank() -> None:
    hidden, weight, _, targets, _ = make(torch.float32, None)
    rows = block(EVEN, dist.group.WORLD)
    targets[0] = V
    with pytest.raises(ValueError, match=f"the id {V}, outside the vocabulary of {V}"):
        head_outputs(hidden, weight[rows], targets, group=dist.group.WORLD)
