"""A plan's bytes on one rank are those of a step on a CPU, which the engine's counters and the allocator report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from areal.api import Batch, LoRAConfig, MicroBatchSpec, TokenOutputs
from areal.plan.hardware import Hardware
from areal.plan.trace import Trace, Workload, trace_step
from areal.tests.harness.tiny import NEEDS_CPU, config, family_dir, started
from areal.tests.harness.world import no_world, one_rank
from areal.utils.functional import logprobs

WORKLOAD = Workload(sequences=8, length=128, micro_batch=512)
SHAPES = {"hidden_size": 128, "intermediate_size": 384}
HELD = ("parameters", "optimizer")
"""Kinds that a rank has between steps."""
CASES: dict[str, tuple[str, dict[str, Any], dict[str, int]]] = {
    # In bfloat16, matrix products on a CPU copy their operands: its step is compared where the head needs most.
    "none": ("qwen3", {"dtype": "float32"}, {"vocab_size": 2048}),
    "selective": ("qwen3", {"dtype": "float32"}, {"num_hidden_layers": 4}),
    "full": ("qwen3", {"dtype": "float32"}, {"num_hidden_layers": 4}),
    "adapters": ("qwen3", {"dtype": "float32", "lora": LoRAConfig(rank=16)}, {"num_hidden_layers": 4}),
    "experts": ("qwen3_moe", {"dtype": "bfloat16"}, {"vocab_size": 2048}),
    "megatron": ("qwen3", {"dtype": "float32"}, {"num_hidden_layers": 4}),
    "megatron, full": ("qwen3", {"dtype": "float32"}, {"num_hidden_layers": 4}),
    "megatron, experts": ("qwen3_moe", {"dtype": "float32"}, {"num_hidden_layers": 4}),
}


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[NEEDS_CPU] if name.startswith("megatron") else []) for name in CASES]
)
def test_bytes_are_those_of_a_step(case: str, tmp_path: Path) -> None:
    plan, measured, gradients = plan_and_step(case, tmp_path)
    # At the peak, in the second micro-batch, the gradients of the first exist.
    assert plan.memory["gradients"] == gradients > 0
    assert (plan.memory["logits"] > 0) == ("vocab_size" in CASES[case][2])
    # Megatron-Core's gradients have buffers, which exist before the step.
    held = (*HELD, "gradients") if case.startswith("megatron") else HELD
    assert sum(nbytes for kind, nbytes in plan.memory.items() if kind not in held) == pytest.approx(measured, rel=0.01)


def plan_and_step(case: str, folder: Path) -> tuple[Trace, int, int]:
    """Return the plan of a step, and of that step the peak of allocated bytes and the bytes of gradients."""
    family, changes, shape = CASES[case]
    backend, _, checkpointing = case.rpartition(", ") if ", " in case else ("", "", case)
    backend = "megatron:d1" if case.startswith("megatron") else "fsdp:d1"
    checkpointing = checkpointing if checkpointing in ("selective", "full") else "none"
    spec = MicroBatchSpec(max_tokens_per_mb=WORKLOAD.micro_batch)
    path = family_dir(family, **SHAPES, **shape)
    settings = {**changes, "path": path, "mb_spec": spec, "activation_checkpointing": checkpointing}
    with no_world():
        plan = trace_step(config(backend, init_from_scratch=True, **settings), WORKLOAD, 0, Hardware(), 2**34)
    # On a CPU, the head leaves out tokens without a target.
    all_rows = mock.patch.object(logprobs, "_rows_with_targets", return_value=None)
    # oneDNN returns new memory, where other products write into a buffer.
    others = torch.backends.mkldnn.flags(enabled=False)
    with one_rank(), all_rows, others, started(backend, **settings) as engine:
        engine.train_batch(WORKLOAD.batch(), negative_logprobs)
        (memory,) = engine.memory()
        assert {kind: plan.memory[kind] for kind in HELD} == {
            "parameters": memory.params.total,
            "optimizer": memory.optimizer.total,
        }
        with engine.profile(folder):
            engine.forward_backward(WORKLOAD.batch(), negative_logprobs)
        gradients = engine.memory()[0].grads.on_device
    timeline = json.loads((folder / "memory-rank0.json").read_text())
    return plan, timeline["peak"]["bytes"], gradients


def negative_logprobs(outputs: TokenOutputs, batch: Batch) -> Any:
    """Return the loss of a plan."""
    logprobs: Any = outputs.logprobs
    return -logprobs.sum()
