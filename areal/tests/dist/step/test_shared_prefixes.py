"""Shared prefixes compared with the same engine without sharing: every output, the gradient of all outputs, and errors.

The grid compares sharing with the float64 reference in every layout; experts are tested in ``dist/parallel/test_moe_layouts.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from areal.api import Batch, MicroBatchSpec, ParallelDims, TokenOutputs, TopK
from areal.tests.grid.cases import CASES, samples
from areal.tests.grid.compare import assert_tensors
from areal.tests.grid.float64_mode import float64_everywhere
from areal.tests.harness.tiny import Sample, family_dir, gradients_of, local_batch, started
from areal.tests.harness.world import record

EVERYTHING = ("logprobs", "entropy", "values", "logits", "hidden", TopK(3))
WAYS = (
    "fsdp:d1",
    "megatron:d1",
    "fsdp:c2-ulysses",
    "fsdp:c2-gather_kv",
    "fsdp:p2",
    "megatron:c2-gather_kv",
    "fsdp:c2p2",
)


def settings(way: str) -> tuple[str, dict[str, Any]]:
    backend, _, how = way.partition("-")
    engine = ParallelDims.parse(backend).backend
    options: dict[str, Any] = {"dtype": "float64", "master_dtype": "float64", "grad_reduce_dtype": "float64"}
    return backend, options | ({engine: {"context_parallel": how}} if how else {})


def masked() -> list[Sample]:
    """Return sequences of one family with different output masks, which overlap partly."""
    batch = samples(CASES["family"])
    for i, sample in enumerate(batch):
        sample["output_mask"] = (torch.arange(len(sample["input_ids"])) + i // 3) % 4 != 0
    return batch


def everything(out: TokenOutputs, batch: Batch) -> Tensor:
    """Return a loss in which each differentiable output has its own factor."""
    total = out.logprobs.new_zeros(())
    for value in (out.logprobs, out.entropy, out.values, out.logits, out.hidden, out.topk.logprobs):
        flat = value.reshape(len(value), -1)
        columns = torch.linspace(0.5, 1.5, flat.shape[1], dtype=flat.dtype)
        total = total + (flat * columns * batch["advantages"][:, None]).sum() / flat.shape[1]
    return total


def run(way: str, spec: MicroBatchSpec) -> tuple[dict[str, Any], dict[str, Tensor], list[tuple[int, int]]]:
    """Return outputs, gradients, and per micro-batch the numbers of tokens in the loss and in the model."""
    backend, options = settings(way)
    with float64_everywhere(), started(backend, value_head=True, mb_spec=spec, **options) as engine:
        batch = local_batch(engine, masked())
        result = engine.forward_batch(batch, outputs=EVERYTHING)
        engine.forward_backward(batch, everything, outputs=EVERYTHING, normalization="sum")
        lengths = [(mb.n_tokens, mb.padded_length) for mb in engine.microbatches(batch).real]
        return result, gradients_of(engine), lengths


def marked(way: str) -> Any:
    world = ParallelDims.parse(way.partition("-")[0]).world_size
    return pytest.param(way, marks=[pytest.mark.world(world)])


@pytest.mark.parametrize("way", [marked(way) for way in WAYS])
def test_shared_prefixes_give_equal_outputs_and_gradients(way: str) -> None:
    plain, expected, _ = run(way, MicroBatchSpec(max_tokens_per_mb=72))
    shared, gradients, lengths = run(way, MicroBatchSpec(max_tokens_per_mb=72, share_prefixes=True))
    assert sum(computed for _, computed in lengths) < 0.8 * sum(seen for seen, _ in lengths)
    for name in plain:
        one, other = (pytree.tree_leaves(outputs[name]) for outputs in (plain, shared))
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(b, a, atol=1e-12, rtol=1e-12)
    error = assert_tensors([(name, x) for name, x in gradients.items()], expected, 1e-11)
    record("shared prefixes: gradients beside those without", way, error=f"{error:.0e}")


@pytest.mark.world(1)
def test_unpacked_model_does_not_share_prefixes() -> None:
    spec = MicroBatchSpec(share_prefixes=True)
    with (
        pytest.raises(ValueError, match="one sequence per row"),
        started("fsdp:d1", path=family_dir("qwen3"), mb_spec=spec, fsdp={"attention": "rows"}),
    ):
        raise RuntimeError("not reached")
