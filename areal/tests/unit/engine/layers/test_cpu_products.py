"""Float32 products by oneDNN and OpenBLAS: values, gradients, what is kept for the backward, and where they are used."""

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
from torch.utils.flop_counter import FlopCounterMode

from areal.api.config import ActivationCheckpointing
from areal.engine.fsdp.activation_checkpointing import RecomputedForward, recompute_layers
from areal.engine.model.fused_layers import replace_linears
from areal.utils.functional import product
from areal.utils.functional.batch_invariant import batch_invariant

OPERATIONS = {"oneDNN": "_linear_pointwise", "OpenBLAS": "openblas_mm"}

PRODUCTS = ("mm", "addmm", "bmm", "matmul", *OPERATIONS.values())


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


@pytest.fixture(params=list(OPERATIONS))
def faster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let this processor be one on which a library is faster, for products of any size. Returns the name of its operation."""
    name: str = request.param
    if name == "oneDNN" and not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("this build of torch has no oneDNN")
    library = product.OneDNN() if name == "oneDNN" else product.OpenBLAS()
    monkeypatch.setattr(library, "suits", lambda rows, inner, columns: rows * inner * columns > 0)
    monkeypatch.setattr(product, "_library_of_processor", lambda: library)
    return OPERATIONS[name]


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [(), (7,), (1, 33), (2, 3, 5), (0,)])
@pytest.mark.parametrize("upstream", ["random", "transposed", "expanded"])
def test_linear_is_that_of_torch(faster: str, rows: tuple[int, ...], bias: bool, upstream: str) -> None:
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
        assert seen.calls == {faster: 3}


@pytest.mark.parametrize("rows", [(7,), (1, 33)])
def test_result_may_be_changed_in_place(faster: str, rows: tuple[int, ...]) -> None:
    x, weight = _random(*rows, 24).float().requires_grad_(), _random(40, 24, seed=1).float()
    product.linear_product(x, weight).mul_(2).sum().backward()
    expected = 2 * weight.sum(0)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, expected.expand(x.shape))


def test_operands_in_any_layout(faster: str) -> None:
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
def test_what_is_kept(faster: str, trained: str) -> None:
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


class Layer(nn.Module):
    """Two linear layers, the first of which has a bias."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(24, 40), nn.Linear(40, 24, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(product.linear_product(x, self.up.weight, self.up.bias)))


@pytest.mark.parametrize("packed", [False, True])
def test_kept_products_do_not_change(faster: str, packed: bool) -> None:
    """Of selective checkpointing, also where the results are packed, as by ``fsdp.activation_offload``."""

    def gradients(how: ActivationCheckpointing) -> list[Tensor]:
        layer, x = Layer(), _random(33, 24, seed=4).float().requires_grad_()
        recompute_layers([layer], how, 1.0)
        if packed and isinstance(layer.forward, RecomputedForward):
            layer.forward.hooks = lambda: (lambda tensor: tensor, lambda tensor: tensor)
        layer(x).square().sum().backward()
        assert x.grad is not None
        return [x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]

    with Products() as seen:
        selective = gradients("selective")
    assert seen.calls[faster] == 3
    assert len(selective) == 4
    torch.testing.assert_close(selective, gradients("none"), rtol=0, atol=0)


def test_not_where_another_is_asked_for(faster: str) -> None:
    model = nn.Sequential(nn.Linear(24, 40), nn.Linear(40, 8))
    replace_linears(model)
    x = _random(5, 24).float()
    assert products(lambda: model(x)) == {faster: 2}
    with torch.backends.mkldnn.flags(enabled=False):
        assert products(lambda: model(x)) == {"addmm": 2}
    with torch.autocast("cpu", torch.bfloat16):
        assert products(lambda: model(x)) == {"addmm": 2}
    assert products(lambda: batch_invariant()(model)(x)).keys() in ({"mm"}, {"addmm"})
    assert products(lambda: model.double()(x.double())) == {"addmm": 2}


def test_not_where_torch_is_as_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    def operation(rows: int, inner: int, columns: int) -> list[str]:
        x, weight = torch.randn(rows, inner), torch.randn(columns, inner)
        return list(products(lambda: product.linear_product(x, weight)))

    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(product, "_library_of_processor", lambda: None)
    assert operation(512, 64, 512) == ["mm"]
    monkeypatch.setattr(product, "_library_of_processor", product.OpenBLAS)
    assert operation(512, 64, 512) == ["openblas_mm"]
    assert operation(512, 63, 512) == ["mm"]  # small
    assert operation(128, 1024, 512) == ["mm"]  # a small result of large operands
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert operation(512, 64, 512) == ["mm"]
    monkeypatch.setattr(product, "_library_of_processor", product.OneDNN)
    assert operation(1, 64, 8) == ["_linear_pointwise"]


def products(run: Callable[[], Any]) -> Counter[str]:
    with Products() as seen:
        run()
    return seen.calls


@pytest.mark.parametrize(
    ("vendor", "capability", "threads", "expected"),
    [
        ("AuthenticAMD", "AVX512", {}, "OneDNN"),
        ("AuthenticAMD", "AVX2", {}, None),
        ("AuthenticAMD", "AVX2", {"OMP_NUM_THREADS": "1"}, "OpenBLAS"),
        ("AuthenticAMD", "AVX2", {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "2"}, None),
        ("AuthenticAMD", "AVX2", {"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "1"}, "OpenBLAS"),
        ("AuthenticAMD", "DEFAULT", {"OMP_NUM_THREADS": "1"}, None),
        ("GenuineIntel", "AVX512", {"OMP_NUM_THREADS": "1"}, None),
        ("GenuineIntel", "AVX2", {"OMP_NUM_THREADS": "1"}, None),
        (None, "AVX512", {"OMP_NUM_THREADS": "1"}, None),
    ],
)
def test_the_processor_decides(
    vendor: str | None,
    capability: str,
    threads: dict[str, str],
    expected: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    if vendor is not None:
        cpuinfo.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\n")
    monkeypatch.setattr(product, "_CPUINFO", cpuinfo)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    for name in ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in threads.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(product, "_numpy_has_openblas", lambda: True)
    product._library_of_processor.cache_clear()
    try:
        library = product._library_of_processor()
    finally:
        product._library_of_processor.cache_clear()
    assert (None if library is None else type(library).__name__) == expected


def test_numpy_of_these_tests_has_openblas() -> None:
    assert product._numpy_has_openblas()


def test_memory_of_operands_can_be_freed() -> None:
    """FSDP frees the storage of gathered weights, which a tensor's ``numpy()`` would forbid."""
    weight = nn.Parameter(torch.randn(24, 40))
    product.openblas_mm(torch.randn(8, 24), weight)
    weight.untyped_storage().resize_(0)
    assert weight.untyped_storage().nbytes() == 0


def test_an_operation_of_torch() -> None:
    a, b = torch.randn(8, 24), torch.randn(24, 40)
    for operation, options in (
        (product.openblas_mm.default, {}),
        (product.openblas_mm.out, {"out": torch.empty(8, 40)}),
    ):
        checks = ("test_schema", "test_faketensor")
        torch.library.opcheck(operation, (a, b), options, test_utils=checks)
        with FlopCounterMode(display=False) as counter:
            operation(a, b, **options)
        assert counter.get_total_flops() == 2 * 8 * 24 * 40
