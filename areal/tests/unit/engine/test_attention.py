"""Packed attention kernel compared with a naive reference in float64, and its calls to GPU kernels."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from areal.engine.attention import capability, kernels
from areal.engine.attention.kernels import AttentionOptions, Segments, packed_attention


def naive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: list[tuple[int, int]],
    *,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Compute one softmax row at a time."""
    groups = q.shape[1] // k.shape[1]
    rows, q0, k0 = [], 0, 0
    for a, b in lengths:
        for i in range(a):
            last = k0 + i + b - a
            first = k0 if window is None else max(k0, last - window + 1)
            for head in range(q.shape[1]):
                keys = slice(first, last + 1), head // groups
                logits = scale * (k[keys] @ q[q0 + i, head])
                if softcap is not None:
                    logits = softcap * torch.tanh(logits / softcap)
                if sinks is not None:
                    logits = torch.cat([logits, sinks[head : head + 1]])
                rows.append(logits.softmax(0)[: last + 1 - first] @ v[keys])
        q0, k0 = q0 + a, k0 + b
    return torch.stack(rows).view(q.shape[0], q.shape[1], v.shape[2])


def inputs(
    lengths: list[tuple[int, int]], heads: tuple[int, int], dims: tuple[int, int], seed: int = 0
) -> list[Tensor]:
    """Return q, k, v and sinks in float64, with gradients."""
    rng = torch.Generator().manual_seed(seed)
    n_q, n_k = (sum(column) for column in zip(*lengths, strict=True))
    shapes = [(n_q, heads[0], dims[0]), (n_k, heads[1], dims[0]), (n_k, heads[1], dims[1]), (heads[0],)]
    return [torch.randn(s, dtype=torch.float64, generator=rng, requires_grad=True) for s in shapes]


def segments(lengths: list[tuple[int, int]]) -> Segments:
    return Segments.of(*zip(*lengths, strict=True))


SAME = [(4, 4), (1, 1), (1, 1), (13, 13), (4, 4), (4, 4)]
LOWER_RIGHT = [(2, 5), (1, 1), (1, 7), (9, 12), (3, 3)]


@pytest.mark.parametrize("lengths", [SAME, LOWER_RIGHT], ids=["same", "lower_right"])
@pytest.mark.parametrize(
    ("heads", "dims"), [((4, 4), (8, 8)), ((4, 2), (8, 8)), ((6, 2), (8, 5))], ids=["mha", "gqa", "dv"]
)
@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize(("with_sinks", "softcap"), [(False, None), (True, None), (True, 2.0), (False, 2.0)])
def test_kernel_equals_naive_attention_and_its_gradients(
    monkeypatch: pytest.MonkeyPatch,
    lengths: list[tuple[int, int]],
    heads: tuple[int, int],
    dims: tuple[int, int],
    window: int | None,
    with_sinks: bool,
    softcap: float | None,
) -> None:
    monkeypatch.setattr(kernels, "_BLOCK", 4)  # so that segments span several blocks
    tensors = inputs(lengths, heads, dims)
    used = tensors if with_sinks else tensors[:3]
    options: dict[str, Any] = {
        "scale": 0.6,
        "window": window,
        "softcap": softcap,
        "sinks": tensors[3] if with_sinks else None,
    }
    expected = naive(*tensors[:3], lengths, **options)
    out = packed_attention(*tensors[:3], segments(lengths), AttentionOptions(**options))
    up = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
    assert (out - expected).abs().max() <= 1e-12
    for ours, theirs in zip(torch.autograd.grad(out, used, up), torch.autograd.grad(expected, used, up), strict=True):
        assert (ours - theirs).abs().max() <= 1e-12


def test_kernel_passes_gradcheck() -> None:
    lengths = [(3, 4), (1, 1)]
    tensors = inputs(lengths, (4, 2), (3, 2))

    def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        plain = packed_attention(q, k, v, segments(lengths), AttentionOptions(scale=0.5))
        return plain + packed_attention(q, k, v, segments(lengths), AttentionOptions(scale=0.5, window=2, sinks=sinks))

    assert torch.autograd.gradcheck(run, tensors)


def test_eager_kernel_memory_is_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_BLOCK", 8)
    saved: dict[int, int] = {}

    def remember(x: Tensor) -> Tensor:
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    length = 256
    q, k, v, sinks = inputs([(length, length)], (1, 1), (4, 4))
    with torch.autograd.graph.saved_tensors_hooks(remember, lambda x: x):
        packed_attention(q, k, v, segments([(length, length)]), AttentionOptions(scale=1.0, sinks=sinks))
    logits = length * length * q.element_size()
    assert sum(saved.values()) < logits / 4


@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        (((4, 3, 8), (4, 2, 8), (4, 2, 8)), {}, "Hq a multiple of Hkv"),
        (((5, 2, 8), (4, 2, 8), (4, 2, 8)), {}, "do not cover the 5 queries"),
        (((4, 2, 8), (4, 2, 8), (4, 2, 8)), {"window": 0}, "window = 0"),
        (((4, 2, 8), (4, 2, 8), (4, 2, 8)), {"sinks": torch.zeros(3)}, "each of the 2 query heads"),
    ],
)
def test_kernel_raises_on_mismatched_shapes(shapes: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        packed_attention(*(torch.zeros(s) for s in shapes), Segments.of([3, 1]), AttentionOptions(scale=1.0, **options))


def test_kernel_raises_on_mixed_dtypes_and_empty_segments() -> None:
    x = torch.zeros(2, 1, 4)
    with pytest.raises(ValueError, match=r"float32, torch.bfloat16"):
        packed_attention(x, x.bfloat16(), x, Segments.of([2]), AttentionOptions(scale=1.0))
    for q_lens, k_lens in [((2, 0), (2, 1)), ((2,), (1,)), ((1, 1), (2,))]:
        with pytest.raises(ValueError, match="each segment needs"):
            Segments.of(q_lens, k_lens)


@pytest.mark.parametrize("window", [None, 4])
def test_keys_shared_by_several_segments(window: int | None) -> None:
    """Key rows by index, some shared by several segments, give the result of a copy per segment."""
    generator = torch.Generator().manual_seed(0)
    paths = [torch.arange(5), torch.tensor([0, 1, 2, 5, 6]), torch.tensor([0, 1, 2, 5, 7, 8, 9])]
    q, k, v = (torch.randn(10, heads, 4, dtype=torch.float64, generator=generator) for heads in (4, 2, 2))
    own, full, index = (5, 2, 3), [len(path) for path in paths], torch.cat(paths)
    up = torch.randn(10, 4, 4, dtype=torch.float64, generator=generator)
    actual = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = [x.clone().requires_grad_() for x in (q, k, v)]
    shared = packed_attention(*actual, Segments.of(own, full, keys=index), AttentionOptions(scale=0.5, window=window))
    copies = (expected[1][index], expected[2][index])
    apart = packed_attention(expected[0], *copies, Segments.of(own, full), AttentionOptions(scale=0.5, window=window))
    assert torch.equal(shared, apart)
    shared.backward(up)
    apart.backward(up)
    for ours, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours.grad, other.grad, atol=1e-14, rtol=1e-14)


def test_gradient_of_shared_key_is_summed_in_float32() -> None:
    """In bf16, 256 + 1 rounds to 256."""
    row = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
    kernels.TakeRows.apply(row, torch.zeros(512, dtype=torch.int64)).backward(torch.ones(512, 1, dtype=torch.bfloat16))
    assert row.grad is not None
    assert row.grad.dtype == torch.bfloat16
    assert row.grad.item() == 512


def without_data(lengths: list[tuple[int, int]], dims: tuple[int, int]) -> tuple[list[Tensor], Segments]:
    """Return q, k, v and segments under a fake tensor mode."""
    shapes = [x.shape for x in inputs(lengths, (4, 2), dims)[:3]]
    tensors = [torch.empty(s, dtype=torch.bfloat16, requires_grad=True) for s in shapes]
    cu = torch.empty(len(lengths) + 1, dtype=torch.int32)
    q_lens, k_lens = zip(*lengths, strict=True)
    return tensors, Segments(q_lens, k_lens, cu, cu)


@pytest.mark.parametrize(("dims", "width"), [((8, 8), 8), ((12, 5), 16)])
def test_torch_varlen_call_arguments(monkeypatch: pytest.MonkeyPatch, dims: tuple[int, int], width: int) -> None:
    calls: list[dict[str, Any]] = []
    varlen = kernels.varlen_attn

    def spy(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        heads, widths = [[x.shape[i] for x in (q, k, v)] for i in (1, 2)]
        calls.append({"heads": heads, "dims": widths, "max": args[2:], **kwargs})
        return varlen(q, k, v, *args, **kwargs)

    monkeypatch.setattr(kernels, "_runs_varlen", lambda *_: True)
    monkeypatch.setattr(kernels, "flash_attn_varlen_func", None)
    monkeypatch.setattr(kernels, "varlen_attn", spy)
    with FakeTensorMode():
        qkv, ends = without_data(LOWER_RIGHT, dims)
        index = torch.empty(sum(ends.k_lens), dtype=torch.int64)
        for segments, window in ((ends, None), (ends, 3), (dataclasses.replace(ends, keys=index), None)):
            out = packed_attention(*qkv, segments, AttentionOptions(scale=0.5, window=window))
            assert out.shape == (qkv[0].shape[0], 4, dims[1])
            for x, grad in zip(qkv, torch.autograd.grad(out.sum(), qkv), strict=True):
                assert grad.shape == x.shape
    assert [call["window_size"] for call in calls] == [(-1, 0), (2, 0), (-1, 0)]
    for call in calls:
        assert call["heads"] == ([4, 2, 2] if call.get("enable_gqa") else [4, 4, 4])
        assert call["dims"] == [width] * 3
        assert call["max"] == (9, 12)
        assert call["scale"] == 0.5


def test_flash_attn_call_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    def flash(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        calls.append({"max": args[2:], **kwargs})
        return torch.empty_like(q)

    monkeypatch.setattr(kernels, "_runs_varlen", lambda *_: True)
    monkeypatch.setattr(kernels, "flash_attn_varlen_func", flash)
    with FakeTensorMode():
        qkv, ends = without_data(SAME, (8, 8))
        packed_attention(*qkv, ends, AttentionOptions(scale=0.5, window=4, softcap=3.0))
        packed_attention(*qkv, ends, AttentionOptions(scale=0.5))
    common = {"max": (13, 13), "softmax_scale": 0.5, "causal": True, "deterministic": False}
    assert calls == [
        common | {"window_size": (3, 0), "softcap": 3.0},
        common | {"window_size": (-1, 0), "softcap": 0.0},
    ]


def test_varlen_kernels_run_supported_configurations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capability, "compute_capability", lambda device: (8, 0))
    capability._missing.cache_clear()

    def runs(dtype: torch.dtype = torch.bfloat16, width: int = 64, device: str = "cuda", **options: Any) -> bool:
        q = torch.empty(1, 1, width, dtype=dtype, device=device)
        return kernels._runs_varlen(q, q, AttentionOptions(scale=1.0, **options))

    with FakeTensorMode():
        for flash in (None, packed_attention):
            monkeypatch.setattr(kernels, "flash_attn_varlen_func", flash)
            assert runs()
            assert runs(torch.float16)
            assert runs(softcap=2.0) == (flash is not None)
            assert not runs(torch.float32)
            assert not runs(torch.float64)
            assert not runs(width=264)
            assert not runs(device="cpu")
            assert runs(sinks=torch.empty(1))
            assert not runs(sinks=torch.empty(1), softcap=2.0)
