"""Operations by kernels of other packages, which stand-ins with their arguments compute sequence by sequence."""

from __future__ import annotations

import itertools
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from areal.engine.recurrence import kernels
from areal.engine.recurrence.chunks import ChunkSizes, RunChunks
from areal.engine.recurrence.kernels import PACKAGES, Operations, kernel_operations, operations_on
from areal.tests.unit.engine.recurrence import token_by_token as one
from areal.tests.unit.engine.recurrence.token_by_token import TREES, Tree

trees = pytest.mark.parametrize("tree", TREES.values(), ids=TREES)


class Packages:
    """Modules with kernels. Each refuses what those of the packages refuse; ``calls`` counts them."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def operations(self) -> Operations:
        modules = (
            SimpleNamespace(chunk_gated_delta_rule=self.delta_rule),
            SimpleNamespace(chunk_kda=self.delta_rule),
            SimpleNamespace(causal_conv1d_fn=self.convolution),
            SimpleNamespace(mamba_chunk_scan_combined=self.scan),
        )
        return kernel_operations(dict(zip(PACKAGES, modules, strict=True)))

    def delta_rule(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        scale: float | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        assert (q.shape, q.shape[:3], v.shape[:3]) == (k.shape, beta.shape, beta.shape)
        assert (len(q), use_qk_l2norm_in_kernel) == (1, True)
        self.calls["delta rule"] += 1
        borders = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
        parts = [one.delta_rule(*(x[0, a:b] for x in (q, k, v, g, beta))) for a, b in itertools.pairwise(borders)]
        return torch.cat(parts)[None], None

    def convolution(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        seq_idx: Tensor | None = None,
        activation: str | None = None,
    ) -> Tensor:
        # As the package recognizes channels that lie next to each other.
        assert x.stride(1) == 1 < x.stride(2)
        assert activation == "silu"
        assert bias is not None
        self.calls["convolution"] += 1
        per_token = [each.expand(x.shape[2], *each.shape) for each in (weight, bias)]
        return _by_sequence(seq_idx, one.convolution, x[0].T, *per_token).T[None]

    def scan(
        self,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        D: Tensor | None = None,
        seq_idx: Tensor | None = None,
    ) -> Tensor:
        assert D is not None
        self.calls["scan"] += 1
        a, d = (each.expand(x.shape[1], -1) for each in (A, D))
        return _by_sequence(seq_idx, one.state_space, x[0], dt[0], a, B[0], C[0], d)[None]


def _by_sequence(seq_idx: Tensor | None, compute: Any, *xs: Tensor) -> Tensor:
    if seq_idx is None:
        return compute(*xs)
    assert (seq_idx.dtype, seq_idx.shape) == (torch.int32, (1, len(xs[0])))
    lengths = seq_idx[0].unique_consecutive(return_counts=True)[1].tolist()
    return torch.cat([compute(*parts) for parts in zip(*(x.split(lengths) for x in xs), strict=True)])


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def chunks_of(tree: Tree) -> RunChunks:
    return RunChunks.of(tree.stream(), ChunkSizes(8, 3))


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let stand-ins compute in float64."""
    monkeypatch.setattr(kernels, "_DTYPES", (torch.float64,))


@pytest.mark.usefixtures("wide")
@trees
@pytest.mark.parametrize("channels", [False, True], ids=["gated", "kimi"])
def test_delta_rule_of_flash_linear_attention(tree: Tree, channels: bool) -> None:
    """Sequences are kept apart; with shared prefixes, torch computes."""
    torch.manual_seed(0)
    packages, t = Packages(), tree.length
    inputs = [normal(t, 2, 3), normal(t, 2, 3), normal(t, 4, 5)]
    inputs += [-0.1 * torch.rand(t, 4, *([3] if channels else []), dtype=torch.float64), torch.rand(t, 4).double()]
    actual = packages.operations().delta_rule(chunks_of(tree), *inputs, normalize=True)
    torch.testing.assert_close(actual, tree.each(one.delta_rule, *inputs), rtol=0, atol=1e-12)
    assert packages.calls["delta rule"] == (tree is not TREES["branches"])


@pytest.mark.usefixtures("wide")
@trees
def test_convolution_of_causal_conv1d(tree: Tree) -> None:
    """With shared prefixes, and of one token, torch computes."""
    torch.manual_seed(0)
    packages, t = Packages(), tree.length
    x, weight, bias = normal(t, 8), normal(8, 4), normal(8)
    actual = packages.operations().convolution(chunks_of(tree), x.T[None].contiguous(), weight, bias, "silu")
    per_token = [each.expand(t, *each.shape) for each in (weight, bias)]
    torch.testing.assert_close(actual[0].T, tree.each(one.convolution, x, *per_token), rtol=0, atol=1e-12)
    assert packages.calls["convolution"] == (tree not in (TREES["branches"], TREES["token"]))


@pytest.mark.usefixtures("wide")
@trees
def test_scan_of_mamba_ssm(tree: Tree) -> None:
    torch.manual_seed(0)
    packages, t = Packages(), tree.length
    x, dt, a, d = normal(t, 4, 3), torch.rand(t, 4).double(), -torch.rand(4).double(), normal(4)
    b, c = normal(t, 2, 5), normal(t, 2, 5)
    actual = packages.operations().scan(chunks_of(tree), x, dt, a, b, c, d)
    per_token = [each.expand(t, -1) for each in (a, d)]
    expected = tree.each(one.state_space, x, dt, per_token[0], b, c, per_token[1])
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    assert packages.calls["scan"] == (tree is not TREES["branches"])


def test_other_dtypes_and_sizes_are_computed_by_torch() -> None:
    """Kernels take 16 bits, convolutions of 2 to 4 tokens over a multiple of 8 channels, and SiLU."""
    packages, tree = Packages(), TREES["sequences"]
    run, chunks, t = packages.operations(), chunks_of(tree), tree.length
    run.delta_rule(chunks, *(normal(t, 2, 3) for _ in range(3)), -torch.rand(t, 2), torch.rand(t, 2), normalize=True)
    run.scan(chunks, normal(t, 4, 3), torch.rand(t, 4), -torch.rand(4), normal(t, 2, 5), normal(t, 2, 5))
    run.convolution(chunks, normal(8, t)[None], normal(8, 4))
    narrow = {"dtype": torch.bfloat16}
    for channels, taps, activation in ((6, 4, "silu"), (8, 1, "silu"), (8, 4, "gelu")):
        x, weight = torch.randn(1, channels, t, **narrow), torch.randn(channels, taps, **narrow)
        run.convolution(chunks, x, weight, None, activation)
    assert not packages.calls


def test_only_cuda_has_kernels() -> None:
    assert operations_on(torch.device("cpu")) == Operations()
    assert kernel_operations({}) == Operations()
