"""Operations of the chunked head over all logits of a chunk, and the dtypes of its products.

A CPU has no product of 16-bit operands with a float32 result. A stand-in computes the same numbers here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from areal.tests.unit.logprobs.head_cases import compare, make, named, reference, relative, scalar, update_of
from areal.utils.functional import head_outputs, logits, product
from areal.utils.functional.product import add_product

CHUNK, CHUNKS, VOCAB, WIDTH = 32, 3, 400, 8

_ONE_ELEMENT_PER_TARGET = {"gather", "scatter_", "scatter_add_"}
_NO_WORK = {"slice", "t", "view", "detach", "empty_like", "transpose", "unsqueeze", "new_empty", "alias"}


class Passes(TorchDispatchMode):
    """Count operations that read or write a tensor of the size of a chunk's logits."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name not in _ONE_ELEMENT_PER_TARGET | _NO_WORK and any(
            isinstance(x, Tensor) and x.numel() == CHUNK * VOCAB for x in pytree.tree_leaves((args, kwargs, out))
        ):
            self.calls[name] += 1
        return out

    def per_chunk(self) -> float:
        return self.calls.total() / CHUNKS


@pytest.fixture
def wide_products() -> Iterator[Counter[str]]:
    """Give the CPU CUDA's products of 16-bit operands with a float32 result. Returns how often each was called."""
    calls: Counter[str] = Counter()

    def take(name: str, a: Tensor, b: Tensor, out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        calls[name] += 1
        assert a.dtype == b.dtype == torch.bfloat16, "a product of 16-bit operands"
        assert out_dtype == torch.float32
        return a.float(), b.float()

    def mm(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
        return torch.mm(*take("mm", a, b, out_dtype))

    def mm_out(a: Tensor, b: Tensor, out_dtype: torch.dtype, *, out: Tensor) -> Tensor:
        return torch.mm(*take("mm", a, b, out_dtype), out=out)

    def addmm(x: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype, *, beta: float = 1, alpha: float = 1) -> Tensor:
        return torch.addmm(x, *take("addmm", a, b, out_dtype), beta=beta, alpha=alpha)

    def addmm_out(x: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype, *, out: Tensor, **factors: float) -> Tensor:
        return torch.addmm(x, *take("addmm", a, b, out_dtype), **factors, out=out)

    library = torch.library.Library("aten", "IMPL")
    for name, kernel in {
        "mm.dtype": mm,
        "mm.dtype_out": mm_out,
        "addmm.dtype": addmm,
        "addmm.dtype_out": addmm_out,
    }.items():
        library.impl(name, kernel, "CPU")
    product._adds_to_wider.cache_clear()
    with mock.patch.object(product, "_OUT_DTYPE_DEVICES", frozenset({"cpu"})):
        yield calls
    product._adds_to_wider.cache_clear()
    library._destroy()


PASSES: dict[str, tuple[dict[str, Any], int, int]] = {
    "logprobs": ({}, 2, 4),
    "number": ({"temperature": 0.7, "logit_scale": 3.0}, 2, 4),
    "per-token": ({"temperature": torch.rand(CHUNK * CHUNKS) + 0.5}, 2, 4),
    "softcap": ({"softcap": 3.0}, 4, 6),
    "entropy": ({"entropy": True}, 5, 7),
    "topk": ({"topk": 3}, 5, 4),
}
"""Options, passes forward, and passes backward with kept logits."""


def count_passes(dtype: torch.dtype, keep: int | None, **options: Any) -> tuple[float, float]:
    hidden = torch.randn(CHUNK * CHUNKS, WIDTH, dtype=dtype, requires_grad=True)
    weight = torch.randn(VOCAB, WIDTH, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, VOCAB, (CHUNK * CHUNKS,))
    with Passes() as forward:
        out = named(head_outputs(hidden, weight, targets, chunk_size=CHUNK, keep_bytes=keep, **options))
    with Passes() as backward:
        scalar(out).backward()
    return forward.per_chunk(), backward.per_chunk()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("keep", "again"), [(None, 0), (0, 1)])
@pytest.mark.parametrize("case", PASSES)
def test_passes_over_a_chunk_are_bounded(case: str, keep: int | None, again: int, dtype: torch.dtype) -> None:
    options, forward, backward = PASSES[case]
    # Recomputed logits repeat the product, and the softcap's tanh and scale.
    again *= 3 if "softcap" in options else 1
    assert count_passes(dtype, keep, **options) == (forward, backward + again)


@pytest.mark.parametrize("keep", [None, 0])
def test_passes_with_16_bit_products_are_those_of_float32(wide_products: Counter[str], keep: int | None) -> None:
    assert count_passes(torch.bfloat16, keep) == (2, 4 if keep is None else 5)
    # Forward, (again,) and two gradients per chunk. Nothing is widened.
    assert wide_products == {"mm": CHUNKS * (2 if keep is None else 3), "addmm": CHUNKS + 1}


def test_bf16_logits_are_not_rounded(request: pytest.FixtureRequest) -> None:
    """On a CPU, with products of 16-bit operands, and through the head or as full logits."""
    hidden, weight, bias, targets, temperature = make(torch.bfloat16)
    for wide in (False, True):
        if wide:
            request.getfixturevalue("wide_products")
        for options in ({}, {"bias": bias}, {"temperature": 0.6}, {"temperature": temperature, "logit_scale": 1.7}):
            got = named(head_outputs(hidden, weight, targets, entropy=True, topk=4, **options))
            want = reference(hidden, weight, targets, entropy=True, topk=4, **options)
            assert all(relative(x, want[name]) <= 5e-6 for name, x in got.items())
            z = logits(hidden, weight, **options)
            logp = torch.log_softmax(z, -1).gather(1, targets.clamp(min=0)[:, None])[:, 0] * (targets >= 0)
            assert relative(logp, want["logprobs"]) <= 5e-6


@pytest.mark.parametrize("keep", [None, 0])
@pytest.mark.parametrize("columns", [None, 3])
@pytest.mark.parametrize("fp32", [False, True])
@pytest.mark.parametrize("extra", [{}, {"softcap": 3.0}, {"entropy": True}, {"topk": 4}, {"temperature": 0.6}])
def test_16_bit_products_give_the_gradients(
    wide_products: Counter[str], extra: dict[str, Any], fp32: bool, columns: int | None, keep: int | None
) -> None:
    """The gradient of the logits is rounded once, to 8 bits, unless ``fp32``. All sums are float32."""
    hidden, weight, _, targets, _ = make(torch.bfloat16, columns=columns)
    if columns:
        targets[0] = targets[0, 0]  # a repeated target, which counts each time
    got = named(head_outputs(hidden, weight, targets, chunk_size=4, keep_bytes=keep, fp32=fp32, **extra))
    # The gradients are bfloat16 as their leaves are: 2^-9 of each.
    compare([hidden, weight], got, reference(hidden, weight, targets, **extra), 2.0**-9 if fp32 else 8e-3)
    assert wide_products.total() >= 3


@pytest.mark.parametrize("fp32", [False, True])
def test_sums_of_gradients_are_not_rounded(wide_products: Counter[str], fp32: bool) -> None:
    """A product that was rounded before it is added would lose 2^-9 of it."""
    hidden, weight, _, targets, _ = make(torch.bfloat16)
    update = update_of(torch.float32)
    leaves = [update.down, update.up]
    got = named(head_outputs(hidden, weight, targets.clamp(min=0), update=update, chunk_size=4, fp32=fp32))
    want = reference(hidden, weight.double() + update.scale * (update.up @ update.down), targets.clamp(min=0))
    compare(leaves, got, want, 5e-6 if fp32 else 2e-2)
    total = torch.randn(3, 5)
    a, b = torch.randn(3, 300).bfloat16(), torch.randn(300, 5).bfloat16()
    exact = total.double() + a.double() @ b.double()
    for adds in (True, False):  # earlier versions of torch do not add to a wider matrix
        with mock.patch.object(product, "_adds_to_wider", return_value=adds):
            assert relative(add_product(total.clone(), a, b), exact) <= 1e-6
    assert relative(product.product(a, b, scale=0.3, bias=torch.ones(5)), 0.3 * (a.double() @ b.double() + 1)) <= 1e-6


@pytest.mark.parametrize("frozen", ["hidden", "weight", "bias"])
def test_full_logits_have_gradients_of_what_requires_them(wide_products: Counter[str], frozen: str) -> None:
    hidden, weight, bias, _, _ = make(torch.bfloat16)
    tensors = {"hidden": hidden, "weight": weight, "bias": bias}
    tensors[frozen].requires_grad_(False)
    leaves = [x for x in tensors.values() if x.requires_grad]
    want = hidden.double() @ weight.double().t() + bias.double()
    compare(leaves, {"logits": logits(hidden, weight, bias=bias)}, {"logits": want}, 2e-2)
    assert tensors[frozen].grad is None


def test_a_narrower_result_is_refused() -> None:
    wide = torch.zeros(2, 2, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"operands are torch.float64 .* pass a result at least as wide"):
        product.product(wide, wide)
    with pytest.raises(ValueError, match="pass a buffer"):
        product.product(wide, wide, torch.float64, into=torch.zeros(2, 2))
