"""Memory use and recomputation of the chunked output head."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from areal.tests.unit.logprobs.head_cases import CHUNK, CHUNK_BYTES, K, T, make, named, scalar
from areal.utils.functional import head_outputs, logits


class Seen(TorchDispatchMode):
    """Count operations by name, and record the number of elements of the largest result and of its storage."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls[func.overloadpacket.__name__] += 1
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.numel(), x.untyped_storage().nbytes() // x.element_size())
        return out

    @property
    def products(self) -> int:
        """Number of matrix products."""
        return sum(self.calls[name] for name in ("mm", "addmm", "addmm_", "_linear_pointwise", "openblas_mm"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [None, K])
@pytest.mark.parametrize(("keep_bytes", "more"), [(0, 1.5), (None, 1.2)])
def test_chunked_head_never_allocates_full_logits(
    columns: int | None, dtype: torch.dtype, keep_bytes: int | None, more: float
) -> None:
    tokens, vocab, width, chunk = 192, 640, 8, 16
    hidden = torch.randn(tokens, width, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab, width, dtype=dtype, requires_grad=True)
    bias = torch.randn(vocab, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, vocab, (tokens,) if columns is None else (tokens, columns))
    options: dict[str, Any] = {"bias": bias, "softcap": 3.0, "temperature": 0.7, "entropy": True, "topk": 4}
    with Seen() as seen:
        out = head_outputs(hidden, weight, targets, chunk_size=chunk, keep_bytes=keep_bytes, **options)
        forward_calls = seen.calls.total()
        scalar(named(out)).backward()
    assert seen.calls.total() > more * forward_calls, "the mode did not see backward"
    assert seen.elements == max(chunk * vocab, vocab * width, tokens * width)
    with Seen() as seen:
        logits(hidden, weight)
    assert seen.elements == tokens * vocab, "the mode cannot see what it should forbid"


def test_default_chunk_is_smaller_than_the_batch() -> None:
    tokens, vocab = 1024, 40_000
    hidden, weight = torch.randn(tokens, 2, requires_grad=True), torch.randn(vocab, 2, requires_grad=True)
    with Seen() as seen:
        out = head_outputs(hidden, weight, torch.zeros(tokens, dtype=torch.int64))
        assert out.logprobs is not None
        out.logprobs.sum().backward()
    assert seen.elements * 4 <= 32 * 2**20


@pytest.mark.parametrize(("keep_bytes", "again"), [(0, 3), (CHUNK_BYTES - 1, 3), (2 * CHUNK_BYTES, 1), (None, 0)])
def test_small_logits_are_kept_instead_of_recomputed(keep_bytes: int | None, again: int) -> None:
    hidden, weight, _, targets, _ = make()
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with Seen() as seen, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = head_outputs(hidden, weight, targets.clamp(min=0), chunk_size=CHUNK, keep_bytes=keep_bytes).logprobs
        assert out is not None
        out.sum().backward()
    chunks = -(-T // CHUNK)
    assert seen.products == 3 * chunks + again
    assert sum(x.ndim == 2 and x.shape[1] == weight.shape[0] for x in kept) == chunks - again


def test_gradients_may_be_computed_twice() -> None:
    hidden, weight, _, targets, _ = make()
    out = head_outputs(hidden, weight, targets.clamp(min=0), chunk_size=CHUNK).logprobs
    assert out is not None
    first = torch.autograd.grad(out.sum(), (hidden, weight), retain_graph=True)
    again = torch.autograd.grad(out.sum(), (hidden, weight))
    assert all(map(torch.equal, first, again))


def test_no_logits_are_kept_without_backward() -> None:
    hidden, weight, _, targets, _ = make()
    with Seen() as seen:
        with torch.no_grad():
            head_outputs(hidden, weight, targets)
        head_outputs(hidden.detach(), weight.detach(), targets)
    assert seen.products == 2
    assert seen.calls["empty_like"] == 0


@pytest.mark.parametrize("entropy", [False, True])
def test_second_backward_through_kept_logits_is_equal(entropy: bool) -> None:
    hidden, weight, bias, targets, _ = make()
    loss = scalar(named(head_outputs(hidden, weight, targets, bias=bias, entropy=entropy, softcap=2.0)))
    first = torch.autograd.grad(loss, [hidden, weight, bias], retain_graph=True)
    again = torch.autograd.grad(loss, [hidden, weight, bias])
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
