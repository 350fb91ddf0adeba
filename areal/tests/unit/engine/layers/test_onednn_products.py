"""Float32 products by oneDNN: values, gradients, what is kept for the backward, and where they are used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from areal.engine.model.fused_layers import replace_linears
from areal.utils.functional import product

pytestmark = pytest.mark.skipif(
    not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="this build of torch has no oneDNN"
)

PRODUCTS = ("mm", "addmm", "bmm", "matmul", "_linear_pointwise")


class Products(TorchDispatchMode):
    """Counts matrix products by operation."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in PRODUCTS:
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this processor be one on which oneDNN is faster."""
    monkeypatch.setattr(product, "_has_faster_onednn", lambda: True)


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [(), (7,), (1, 33), (2, 3, 5), (0,)])
@pytest.mark.parametrize("upstream", ["random", "transposed", "expanded"])
def test_linear_is_that_of_torch(faster: None, rows: tuple[int, ...], bias: bool, upstream: str) -> None:
    wide = [_random(*rows, 24), _random(40, 24, seed=1), *([_random(40, seed=2)] if bias else [])]
    weights = {
        "random": _random(*rows, 40, seed=3),
        "transposed": _random(40, *rows, seed=3).movedim(0, -1),
        "expanded": _random(1, seed=3).expand(*rows, 40),
    }[upstream]

    def run(function: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in wide]
        out = function(*leaves)
        out.backward(weights if dtype == torch.float64 else weights.to(dtype))
        return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]

    with Products() as seen:
        ours = run(product.linear_product, torch.float32)
    exact = run(F.linear, torch.float64)
    assert len(ours) == len(exact) == 3 + bias
    for got, expected in zip(ours, exact, strict=True):
        assert got.shape == expected.shape
        torch.testing.assert_close(got.double(), expected, rtol=2e-6, atol=2e-5)
    if 0 not in rows:
        assert seen.calls == {"_linear_pointwise": 3}


@pytest.mark.parametrize("rows", [(7,), (1, 33)])
def test_result_may_be_changed_in_place(faster: None, rows: tuple[int, ...]) -> None:
    x, weight = _random(*rows, 24).float().requires_grad_(), _random(40, 24, seed=1).float()
    product.linear_product(x, weight).mul_(2).sum().backward()
    expected = 2 * weight.sum(0)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, expected.expand(x.shape))


def test_operands_in_any_layout(faster: None) -> None:
    big = _random(90, 60).float()
    for a in (big[:30, :20], big.t()[:30, :20], big[:60:2, :40:2], big[0, :1].expand(30, 20)):
        for b in (big[:20, :50], big.t()[:20, :50], big[:40:2, :50], big[0, :50].expand(20, 50)):
            exact = a.double() @ b.double()
            torch.testing.assert_close(product.matmul(a, b).double(), exact, rtol=2e-6, atol=2e-5)
            total = torch.ones(30, 50)
            product.add_product(total, a, b)
            torch.testing.assert_close(total.double(), exact + 1, rtol=2e-6, atol=2e-5)
            buffer, bias = torch.empty(30, 50), _random(50).float()
            scaled = product.product(a, b, into=buffer, bias=bias, scale=0.25)
            assert scaled.data_ptr() == buffer.data_ptr()
            torch.testing.assert_close(buffer.double(), 0.25 * (exact + bias), rtol=2e-6, atol=2e-5)


@pytest.mark.parametrize("trained", ["x", "weight", "bias"])
def test_what_is_kept(faster: None, trained: str) -> None:
    x, weight, bias = _random(8, 24).float(), _random(40, 24, seed=1).float(), _random(40, seed=2).float()
    leaf = {"x": x, "weight": weight, "bias": bias}[trained].requires_grad_()
    kept: list[tuple[int, ...]] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = product.linear_product(x, weight, bias)
    assert kept == {"x": [(40, 24)], "weight": [(8, 24)], "bias": []}[trained]
    out.sum().backward()
    assert leaf.grad is not None


def test_not_where_torch_is_as_fast_or_another_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(24, 40), nn.Linear(40, 8))
    replace_linears(model)
    x = _random(5, 24).float()

    def products(run: Callable[[], Any]) -> Counter[str]:
        with Products() as seen:
            run()
        return seen.calls

    monkeypatch.setattr(product, "_has_faster_onednn", lambda: False)
    assert products(lambda: model(x)) == {"addmm": 2}
    monkeypatch.setattr(product, "_has_faster_onednn", lambda: True)
    assert products(lambda: model(x)) == {"_linear_pointwise": 2}
    with torch.backends.mkldnn.flags(enabled=False):
        assert products(lambda: model(x)) == {"addmm": 2}
    with torch.autocast("cpu", torch.bfloat16):
        assert products(lambda: model(x)) == {"addmm": 2}
    assert products(lambda: model.double()(x.double())) == {"addmm": 2}


@pytest.mark.parametrize(
    ("vendor", "capability", "expected"),
    [
        ("AuthenticAMD", "AVX512", True),
        ("AuthenticAMD", "AVX2", False),
        ("GenuineIntel", "AVX512", False),
        (None, "AVX512", False),
    ],
)
def test_the_processor_decides(
    vendor: str | None, capability: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    if vendor is not None:
        cpuinfo.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\n")
    monkeypatch.setattr(product, "_CPUINFO", cpuinfo)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    product._has_faster_onednn.cache_clear()
    try:
        assert product._has_faster_onednn() is expected
    finally:
        product._has_faster_onednn.cache_clear()
