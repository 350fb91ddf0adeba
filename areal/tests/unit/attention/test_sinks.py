"""Sinks around a kernel that knows none, and the choice of kernels by GPU. No kernel of a GPU runs here: stand-ins do."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import attention
from transformers import AutoConfig, AutoModelForCausalLM

from areal.engine.attention import capability, kernels
from areal.engine.attention.kernels import AttentionOptions, Segments, packed_attention
from areal.engine.fsdp.layers import attention_kernel

LENGTHS = {"same": ((4, 1, 13, 4), (4, 1, 13, 4)), "lower_right": ((2, 1, 1, 9), (5, 1, 7, 12))}


class Dense:
    """The formulas of flash attention: its backward uses the log-sum-exp and the result that it is given."""

    def __init__(self, ends: Any, scale: float, left: int, grouped: dict[str, Any]) -> None:
        (cu_q, cu_k, *_), self.scale = ends, scale
        self.visible = torch.zeros(int(cu_q[-1]), int(cu_k[-1]), dtype=torch.bool)
        for a, b, c, d in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True):
            window = None if left == -1 else left + 1
            self.visible[a:b, c:d] = kernels._visible(int(b - a), int(d - c), window, torch.device("cpu"))

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        z = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(q.shape[1] // k.shape[1], 1)) * self.scale
        return z.masked_fill(~self.visible, -torch.inf)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z = self.logits(q, k)
        wide = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
        return torch.einsum("hqk,khd->qhd", z.softmax(-1), wide), z.logsumexp(-1), torch.zeros(2)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, _: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        groups = q.shape[1] // k.shape[1]
        p = (self.logits(q, k) - lse[..., None]).exp()
        moved = (grad * out).sum(-1).t()[..., None]
        dz = p * (torch.einsum("qhd,khd->hqk", grad, v.repeat_interleave(groups, 1)) - moved) * self.scale
        dq = torch.einsum("hqk,khd->qhd", dz, k.repeat_interleave(groups, 1))
        dk, dv = torch.einsum("hqk,qhd->khd", dz, q), torch.einsum("hqk,qhd->khd", p, grad)
        return dq, *(x.unflatten(1, (-1, groups)).sum(2) for x in (dk, dv))


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("dims", [(8, 8), (12, 5)])
@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize("sink", [0.0, 5.0, -30.0])
def test_corrected_kernel_equals_attention_with_sinks(
    monkeypatch: pytest.MonkeyPatch,
    lengths: str,
    heads: tuple[int, int],
    dims: tuple[int, int],
    window: int | None,
    sink: float,
) -> None:
    """In the result and all gradients in float64, to 3e-15 of the largest."""
    segments = Segments.of(*LENGTHS[lengths])
    rng = torch.Generator().manual_seed(0)
    shapes = [
        (sum(segments.q_lens), heads[0], dims[0]),
        *((sum(segments.k_lens), heads[1], d) for d in dims),
        heads[:1],
    ]
    leaves = [torch.randn(shape, dtype=torch.float64, generator=rng) for shape in shapes]
    leaves[3] += sink
    leaves = [x.requires_grad_() for x in leaves]
    options = AttentionOptions(scale=0.6, window=window, sinks=leaves[3])
    want = packed_attention(*leaves[:3], segments, options)
    monkeypatch.setattr(kernels, "_runs_varlen", lambda *_: True)
    monkeypatch.setattr(kernels, "TorchVarlen", Dense)
    monkeypatch.setattr(kernels, "flash_attn_varlen_func", None)
    got = packed_attention(*leaves[:3], segments, options)
    up = torch.randn(want.shape, dtype=torch.float64, generator=rng)
    ours, theirs = ((x.detach(), *torch.autograd.grad(x, leaves, up)) for x in (got, want))
    largest = max(float(x.abs().max()) for x in theirs)
    assert max(float((x - y).abs().max()) for x, y in zip(ours, theirs, strict=True)) <= 3e-15 * largest


@pytest.mark.parametrize("window", [None, 3])
def test_sinks_call_the_operations_of_torch(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    """Shapes and arguments only: the operations exist here without data."""
    monkeypatch.setattr(kernels, "_runs_varlen", lambda *_: True)
    with FakeTensorMode():
        q = torch.empty(13, 4, 12, dtype=torch.bfloat16, requires_grad=True)
        k, v = (torch.empty(25, 2, d, dtype=torch.bfloat16, requires_grad=True) for d in (12, 5))
        sinks, cu = torch.empty(4, requires_grad=True), torch.empty(5, dtype=torch.int32)
        segments = Segments(*LENGTHS["lower_right"], cu, cu)
        out = packed_attention(q, k, v, segments, AttentionOptions(scale=0.5, window=window, sinks=sinks))
        assert (out.shape, out.dtype) == ((13, 4, 5), torch.bfloat16)
        grads = torch.autograd.grad(out.sum(), (q, k, v, sinks))
        assert [(x.shape, x.dtype) for x in grads] == [(x.shape, x.dtype) for x in (q, k, v, sinks)]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """A GPU by its compute capability, and the implementations that are activated on it."""
    state: dict[str, Any] = {"capability": (9, 0), "activated": [], "current": None, "error": None}

    def activate(name: str) -> None:
        if state["error"] is not None:
            raise state["error"]
        state["activated"].append(name)

    monkeypatch.setattr(capability, "compute_capability", lambda device: state["capability"])
    monkeypatch.setattr(attention, "activate_flash_attention_impl", activate)
    monkeypatch.setattr(attention, "current_flash_attention_impl", lambda: state["current"])
    caches = (capability._missing, capability._warn_once, capability.activate_flash_attention_3)
    for cached in caches:
        cached.cache_clear()
    yield state
    for cached in caches:
        cached.cache_clear()


CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("cc", "dtype", "width", "reason"),
    [
        ((7, 5), torch.bfloat16, 64, "compute capability 7.5"),
        ((9, 0), torch.float32, 64, "dtype = torch.float32"),
        ((9, 0), torch.bfloat16, 288, "head dim = 288"),
        ((8, 0), torch.float16, 256, None),
        (None, torch.bfloat16, 64, None),  # not an NVIDIA GPU
    ],
)
def test_unsupported_gpus_fall_back_with_one_warning(
    gpu: dict[str, Any], caplog: pytest.LogCaptureFixture, cc: Any, dtype: torch.dtype, width: int, reason: str | None
) -> None:
    gpu["capability"] = cc
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert capability.runs_varlen(CUDA, dtype, width) == (reason is None)
    assert [reason in record.message for record in caplog.records] == ([] if reason is None else [True])
    assert not capability.runs_varlen(torch.device("cpu"), dtype, width)


TINY = {"vocab_size": 8, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
OPTIONS = {
    "softcap": ({"softcap": 50.0}, r"soft cap .* without the package flash_attn: plain .* run instead.*; pip install"),
    "sinks": ({"sinks": torch.zeros(1)}, r"attention sinks with torch .*: plain .* run instead.*; install torch 2\.13"),
    "both": ({"sinks": torch.zeros(1), "softcap": 2.0}, "soft cap .* with attention sinks: no kernel has both; plain"),
}


@pytest.mark.parametrize(("options", "reason"), OPTIONS.values(), ids=OPTIONS)
def test_unsupported_options_fall_back_with_one_warning(
    gpu: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    options: dict[str, Any],
    reason: str,
) -> None:
    monkeypatch.setattr(kernels, "flash_attn_varlen_func", None)
    monkeypatch.setattr(kernels, "SINKS_SUPPORTED", False)
    logged = {}
    with caplog.at_level(logging.WARNING), FakeTensorMode():
        for device in ("cpu", "meta", "cuda"):
            q = torch.empty(1, 1, 64, dtype=torch.bfloat16, device=device)
            for _ in range(3):
                assert not kernels._runs_varlen(q, q, AttentionOptions(scale=1.0, **options))
            logged[device] = len(caplog.records)
    assert logged == {"cpu": 0, "meta": 0, "cuda": 1}
    assert re.match(reason, caplog.records[0].message)


@pytest.mark.parametrize(
    ("family", "logged"), [("gemma2", "soft cap"), ("gpt_oss", "attention sinks"), ("llama", None)]
)
def test_model_on_a_gpu_warns_before_its_first_forward(
    gpu: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    family: str,
    logged: str | None,
) -> None:
    monkeypatch.setattr(kernels, "flash_attn_varlen_func", None)
    monkeypatch.setattr(kernels, "SINKS_SUPPORTED", False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, num_hidden_layers=1, **TINY))
    plain = "torch scaled_dot_product_attention" if logged is None else "plain operations in blocks"
    with caplog.at_level(logging.WARNING):
        assert attention_kernel(model, torch.device("cpu"), torch.bfloat16) == plain
        assert not caplog.records
        for _ in range(2):
            name = attention_kernel(model, CUDA, torch.bfloat16)
    if logged is None:
        assert name == "torch varlen_attn, FlashAttention 3"
        assert not caplog.records
    else:
        assert name == plain
        (record,) = caplog.records
        assert record.message.startswith(logged)
    # With the packages, a kernel runs.
    monkeypatch.setattr(kernels, "flash_attn_varlen_func", packed_attention)
    monkeypatch.setattr(kernels, "SINKS_SUPPORTED", True)
    expected = "flash_attn" if family == "gemma2" else "torch varlen_attn, FlashAttention 3"
    assert attention_kernel(model, CUDA, torch.bfloat16) == expected


def test_hopper_activates_flash_attention_3_once(gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "flash_attn_varlen_func", packed_attention)
    for _ in range(3):
        assert kernels.kernel_name(CUDA, torch.bfloat16) == "torch varlen_attn, FlashAttention 3"
    assert gpu["activated"] == ["FA3"]
    # The package flash_attn computes what torch's kernel does not: soft caps.
    with FakeTensorMode():
        q = torch.empty(1, 1, 64, dtype=torch.bfloat16, device="cuda")
        assert not kernels._runs_flash_attn(q, AttentionOptions(scale=1.0))
        assert kernels._runs_flash_attn(q, AttentionOptions(scale=1.0, softcap=2.0))


@pytest.mark.parametrize("cc", [(8, 0), (10, 0)])
def test_other_gpus_do_not_activate_it(
    gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch, cc: tuple[int, int]
) -> None:
    gpu["capability"] = cc
    monkeypatch.setattr(kernels, "flash_attn_varlen_func", None)
    assert kernels.kernel_name(CUDA, torch.bfloat16) == "torch varlen_attn"
    assert gpu["activated"] == []


def test_missing_package_and_the_callers_choice(gpu: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    gpu["error"] = ImportError("No module named 'flash_attn_interface'")
    with caplog.at_level(logging.WARNING):
        assert not any(capability.activate_flash_attention_3(CUDA) for _ in range(3))
    assert [record.message for record in caplog.records if "flash_attn_interface" in record.message] == [
        "FlashAttention 3 cannot be activated (No module named 'flash_attn_interface'): "
        "install flash_attn_interface to speed up attention"
    ]
    gpu |= {"error": None, "current": "FA4"}
    capability.activate_flash_attention_3.cache_clear()
    assert not capability.activate_flash_attention_3(CUDA)
    assert gpu["activated"] == []


def test_amd_gpus_have_no_compute_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    assert capability.compute_capability(CUDA) == (9, 4)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert capability.compute_capability(CUDA) is None
