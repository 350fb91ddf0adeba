"""A call copies its batch to the device at once, and then the host waits for nothing until the results are read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import masking_utils

from areal.api import MicroBatchSpec, TopK
from areal.engine.attention.context_parallel import ContextParallel
from areal.engine.fsdp.expert_parallel import Dispatch, _CopiedRows, _DispatchedExperts
from areal.engine.fsdp.parallelize import checkpoint_layers, transformer_layers
from areal.engine.fsdp.router import watch_routers
from areal.engine.model.hub import read_config
from areal.engine.model.stacked_experts import WEIGHTS, stacked_experts
from areal.engine.schedule import SequentialSchedule
from areal.tests.grid.vision_models import GRIDS, images, tokens
from areal.tests.harness.tiny import Sample, family_dir, global_batch, started
from areal.tests.unit.gpu.sync_lint import DEVICE, SyncLint
from areal.trainer.losses import KLTerm, MismatchCorrection, PPOClip, policy_objective, sft_objective
from areal.utils import platform, releases
from areal.utils.data import plan_batch
from areal.utils.host_copy import HostCopy

TWO_RANKS: Any = SimpleNamespace(group_name="two ranks")


@contextmanager
def stand_ins() -> Iterator[None]:
    """Let collectives over ``TWO_RANKS`` return at once. On the meta device, values do not matter."""
    size, rank = dist.get_world_size, dist.get_rank
    with (
        mock.patch.object(dist, "get_world_size", lambda group=None: 2 if group is TWO_RANKS else size(group)),
        mock.patch.object(dist, "get_rank", lambda group=None: 1 if group is TWO_RANKS else rank(group)),
        mock.patch.object(releases, "all_gather_single"),
        mock.patch.object(releases, "reduce_scatter_single"),
        mock.patch.object(dist, "all_to_all_single"),
        # With one sequence per row, transformers reads once whether there is padding.
        mock.patch.object(masking_utils, "_ignore_causal_mask_sdpa", return_value=False),
    ):
        yield


def spread_over_two(model: nn.Module) -> None:
    """Keep the first half of the experts of each layer, as :func:`spread_experts` does."""
    for experts in stacked_experts(model):
        half = experts.num_experts = len(experts.gate_up_proj) // 2
        for name in WEIGHTS:
            experts._parameters[name] = nn.Parameter(experts._parameters[name].detach()[:half])
        experts.forward = _DispatchedExperts(experts, half, TWO_RANKS)


@contextmanager
def all_rows_stay() -> Iterator[None]:
    """Let the numbers of rows that the host reads be those of a rank that keeps all of its rows."""
    plan = Dispatch.of

    def of(index: Tensor, *args: Any) -> Dispatch:
        SyncLint.value = [[index.numel(), 0]] * 2
        return plan(index, *args)

    # The second patch restores the value at the end.
    with mock.patch.object(Dispatch, "of", of), mock.patch.object(SyncLint, "value", None):
        yield


@contextmanager
def on_device(family: str, cp: str | None = None, ep: bool = False, **changes: Any) -> Iterator[Any]:
    """Start an engine, and replace its sharded model by the full one on the device of the lint.

    Args:
        cp: mode of context parallelism over two ranks.
        ep: spread experts over two ranks.
    """
    path = family_dir(family)
    with started("fsdp:d1", path=path, **{"mb_spec": SPEC, **changes}) as engine, stand_ins():
        components: Any = engine._components
        # The grouped matrix product of experts is for bfloat16 only.
        model = engine._meta_model(read_config(path)).to(torch.bfloat16)
        watch_routers(transformer_layers(model))
        if ep:
            spread_over_two(model)
            checkpoint_layers(transformer_layers(model), engine.config.activation_checkpointing, 1.0)
        engine.device = DEVICE
        components.model, components.schedule = model, SequentialSchedule(model)
        if cp is not None:
            components.context_parallel = ContextParallel(TWO_RANKS, cp, model.recurrence)
            components.routing._splits = (components.context_parallel,)
        yield engine


def run(engine: Any, batch: list[Sample], outputs: tuple[Any, ...]) -> tuple[SyncLint, SyncLint]:
    """Run a call. Returns the lint of the micro-batches' construction, and the lint of everything after it."""
    with SyncLint() as build:
        mbs = engine._prepare(batch, outputs)

    def process(out: Any, mb: Any) -> tuple[Tensor, None]:
        values = [getattr(out, name) for name in outputs if isinstance(name, str) and name != "routed_experts"]
        return sum((x * mb.data["loss_mask"]).sum() for x in values), None  # type: ignore[return-value]

    divisors = {"loss": 3.0, "moe_aux_loss": 2.0, "moe_z_loss": 1.0}
    with SyncLint() as call, engine._components.routing.counting(divisors, 1.0):
        engine.forward_backward_batch(mbs, process, outputs=outputs)
        engine.forward_backward_batch(mbs, process, outputs=outputs, forward_only=True)
    assert len(mbs) > 2
    return build, call


def batch_with(*keys: str) -> list[Sample]:
    """Return samples with common prefixes, and with the named keys."""
    batch = [dict(sample) for sample in global_batch() if len(sample["input_ids"]) > 4]
    for i, sample in enumerate(batch):
        n = len(sample["input_ids"])
        sample["input_ids"][:4] = batch[0]["input_ids"][:4]
        extra = {
            "temperature": torch.tensor(0.5 + i),
            "output_mask": torch.arange(n) >= 3,
            "routed_experts": torch.tensor([[[0, 2], [1, 3]]]).expand(n, 2, 2),
            "image": torch.randn(i, 3),
        }
        sample.update({key: extra[key] for key in keys})
    return batch


def batch_with_images() -> list[Sample]:
    """Return samples with one or two images, of which some are equal, and one without."""
    parts: list[tuple[Any, ...]] = [(3, GRIDS[0], 2), (3, GRIDS[0], 5), (GRIDS[1], 2, GRIDS[3], 1), (9,)]
    made = []
    for seed, each in enumerate(parts):
        grids = [part for part in each if isinstance(part, tuple)]
        ids = tokens(*each, seed=seed)
        made.append(
            {"input_ids": ids, "loss_mask": torch.ones(len(ids)), **(images(*grids, seed=len(grids)) if grids else {})}
        )
    return made


SPEC = MicroBatchSpec(max_tokens_per_mb=40, payloads=("image",))
SHARED = {"mb_spec": SPEC.model_copy(update={"share_prefixes": True})}
MOE = {"moe": {"aux_loss": 0.5, "z_loss": 0.25, "statistics": True}}
LOGPROBS = ("logprobs",)
TOKEN_KEYS = ("advantages", "old_logprobs", "ref_logprobs", "rollout_logprobs")
ALL_KEYS = ("temperature", "output_mask", "image")
CALLS: dict[str, tuple[str, str | None, dict[str, Any], tuple[str, ...], tuple[Any, ...]]] = {
    "plain": ("qwen3", None, {}, (), LOGPROBS),
    "all keys": ("qwen3", None, {}, ALL_KEYS, ("logprobs", "entropy", TopK(2))),
    "shared": ("qwen3", None, SHARED, ALL_KEYS, LOGPROBS),
    "rows": ("qwen3", None, {"fsdp": {"attention": "rows"}}, ALL_KEYS, LOGPROBS),
    "windows": ("gemma3_text", None, {}, (), LOGPROBS),
    "experts": ("qwen3_moe", None, MOE, (), LOGPROBS),
    "replay": ("qwen3_moe", None, {**MOE, **SHARED}, ("routed_experts",), ("logprobs", "routed_experts")),
    "ulysses": ("qwen3", "ulysses", {}, ALL_KEYS, LOGPROBS),
    "ulysses, shared": ("qwen3", "ulysses", SHARED, ALL_KEYS, LOGPROBS),
    "gather_kv": ("gemma3_text", "gather_kv", {}, (), LOGPROBS),
    "delta rule, shared": ("qwen3_5_text", None, SHARED, ALL_KEYS, LOGPROBS),
    "state space, gather_kv": ("bamba", "gather_kv", {}, (), LOGPROBS),
    "images": ("qwen2_5_vl", None, {"mb_spec": MicroBatchSpec(max_tokens_per_mb=20)}, ("images",), LOGPROBS),
    "images, shared": (
        "qwen3_vl",
        "ulysses",
        {"mb_spec": MicroBatchSpec(max_tokens_per_mb=20, share_prefixes=True)},
        ("images",),
        LOGPROBS,
    ),
    "gather_kv, shared": ("qwen3_moe", "gather_kv", {**MOE, **SHARED}, ("routed_experts",), LOGPROBS),
}


CONTAINED = ("all keys", "windows", "experts", "ulysses")
"""Calls whose paths are those of the other calls."""


@pytest.mark.parametrize("case", list(CALLS))
@pytest.mark.world(1)
def test_call_copies_to_the_device_once_and_never_waits(case: str) -> None:
    family, cp, changes, keys, outputs = CALLS[case]
    with on_device(family, cp, **changes) as engine:
        batch = batch_with_images() if "images" in keys else batch_with(*keys)
        if cp == "gather_kv":
            run(engine, batch, outputs)  # the first call learns the windows of the layers
        build, call = run(engine, batch, outputs)
    assert build.waits == []
    assert len(build.copies) == 1
    assert call.waits == []
    assert call.copies == []


OBJECTIVES = {
    "sft": sft_objective(),
    "policy": policy_objective(PPOClip(), kl=KLTerm(0.1), entropy_coef=0.1, correction=MismatchCorrection()),
}


@pytest.mark.parametrize("name", list(OBJECTIVES))
@pytest.mark.world(1)
def test_call_with_a_loss_waits_for_its_weights_and_its_results(name: str) -> None:
    """Weights are read before the first forward, and results after the last backward; no micro-batch waits."""
    batch = [sample | {key: torch.randn(len(sample["input_ids"])) for key in TOKEN_KEYS} for sample in batch_with()]
    with on_device("qwen3") as engine:
        n_mbs = len(engine._prepare(batch, LOGPROBS))
        with SyncLint() as lint:
            engine.forward_backward(batch, OBJECTIVES[name])
    assert len(lint.waits) == 2, lint.waits
    weights, results = lint.waits
    assert weights == f"tolist [{n_mbs}]"
    assert re.fullmatch(r"tolist \[\d+\]", results)
    assert len(lint.copies) == 1


@pytest.mark.parametrize("how", ["full", "selective", "none"])
@pytest.mark.world(1)
def test_expert_parallelism_waits_once_per_layer_and_micro_batch(how: str) -> None:
    """For the numbers of rows of the all-to-alls, in the forward. A recomputation has them already."""
    with on_device("qwen3_moe", ep=True, activation_checkpointing=how, **MOE) as engine, all_rows_stay():
        layers = len(stacked_experts(engine._components.model))
        build, call = run(engine, batch_with(), LOGPROBS)
        n_mbs = len(engine._prepare(batch_with(), LOGPROBS))
    assert build.waits == []
    # A forward and a backward of each micro-batch, and a forward alone.
    assert call.waits == ["tolist [2, 2]"] * (layers * n_mbs * 2)
    assert call.copies == []


def test_copies_of_rows_for_their_experts_are_one_gather() -> None:
    tokens, copies = 6, 3
    rows = torch.randn(tokens, 4, dtype=torch.float64, requires_grad=True)
    order = torch.randperm(tokens * copies)
    large: list[str] = []

    class Large(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.numel() == tokens * copies * 4:
                large.append(func.name())
            return out

    with Large():
        copied = _CopiedRows.apply(rows, order, order.argsort(), copies)
    assert large == ["aten::index_select"]
    assert torch.equal(copied, rows.repeat_interleave(copies, 0)[order])
    factors = torch.randn(tokens * copies, 4, dtype=torch.float64)
    (gradient,) = torch.autograd.grad((copied * factors).sum(), rows)
    expected = torch.zeros(tokens, 4, dtype=torch.float64).index_add(0, order // copies, factors)
    assert torch.allclose(gradient, expected)


def test_lint_finds_operations_that_wait() -> None:
    x, mask = torch.randn(4, device=DEVICE), torch.tensor([True, False, True, True])
    with SyncLint() as lint:
        mask.to(DEVICE)
        torch.empty(4, device=DEVICE).copy_(torch.ones(4))
        torch.tensor([1.0, 2.0], device=DEVICE)
        x[torch.tensor([0, 2])]
        with pytest.raises(NotImplementedError):
            x.nonzero()
    assert len(lint.waits) == 5, lint.waits
    assert lint.copies == []
    with SyncLint() as lint:
        torch.zeros(2, 3, device=DEVICE).tolist()
        torch.zeros(2).tolist()
    assert lint.waits == ["tolist [2, 3]"]
    # Other reads of values raise on the meta device.
    with pytest.raises(RuntimeError):
        x.item()
    with SyncLint() as lint:
        mask.to(DEVICE, non_blocking=True)
        torch.empty(4, device=DEVICE).copy_(torch.ones(4), non_blocking=True)
        x + torch.tensor(2.0)
        torch.ones(3) + torch.ones(3)
    assert lint.waits == []
    assert len(lint.copies) == 2


# ---- the copy


def test_copy_restores_every_dtype_and_shape() -> None:
    tensors = [
        torch.arange(5, dtype=torch.int32),
        torch.randn(3, 7),
        torch.tensor([True, False, True]),
        torch.randn(2, 3, dtype=torch.float64).T,
        torch.randn(9).to(torch.bfloat16)[2:],
        torch.zeros(0, 4),
        torch.tensor(2.5),
        torch.arange(12)[::3],
    ]
    buffers: list[Tensor] = []

    def allocate(nbytes: int, device: torch.device) -> Tensor:
        buffers.append(torch.empty(nbytes, dtype=torch.uint8))
        return buffers[-1]

    # The destination is a stand-in, so that the values of the buffer can be read.
    copy = HostCopy(DEVICE)
    assert all(copy.add(x) is x for x in [*tensors, tensors[1]])
    with mock.patch.object(platform, "host_buffer", allocate), mock.patch.object(Tensor, "to", lambda x, *_, **__: x):
        copy.run()
    copies = [copy.get(x) for x in tensors]
    assert len(buffers) == 1
    assert len(buffers[0]) == 64 * 8, "a tensor that is added twice has one place"
    for x, copied in zip(tensors, copies, strict=True):
        assert copied.dtype == x.dtype
        assert torch.equal(copied, x)
        assert copied.data_ptr() % 64 == buffers[0].data_ptr() % 64
        assert copied.untyped_storage().data_ptr() == buffers[0].data_ptr()


def test_copy_leaves_tensors_of_a_cpu_and_of_a_graph() -> None:
    x, trained = torch.randn(3), torch.randn(3, requires_grad=True)
    for device in (torch.device("cpu"), DEVICE):
        copy = HostCopy(device)
        copy.add(x)
        copy.add(trained)
        copy.run()
        assert (copy.get(x) is x) == (device.type == "cpu")
        assert copy.get(trained).requires_grad
        assert copy.get(trained).device == device


def test_micro_batches_and_fillers_share_one_copy() -> None:
    plan = plan_batch(batch_with("output_mask", "image"), SPEC)
    with SyncLint() as lint:
        mbs = plan.build(n_mbs=plan.n_mbs + 2, device=DEVICE)
    assert len(lint.copies) == 1
    assert lint.waits == []
    for mb in mbs:
        assert mb.data.cu_seqlens is mb.cu_seqlens
        assert mb.wanted is not None
        assert mb.wanted.device.type == "cpu"
        tensors = [x for key, x in mb.data.items() if isinstance(x, Tensor)] + mb.data["image"]
        assert {x.device for x in tensors} == {DEVICE}
