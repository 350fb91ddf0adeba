"""From a micro-batch to what one rank feeds its model."""

from __future__ import annotations

import torch
from torch import Tensor

from areal.api.batch import IGNORE_INDEX
from areal.api.engine import Outputs
from areal.api.microbatch import MicroBatch
from areal.engine.context_parallel import ContextParallel, position_ids
from areal.engine.model import ModelInputs
from areal.engine.moe import ROUTED_EXPERTS, ExpertRouting
from areal.utils.data import BatchPlan


def model_inputs(
    mb: MicroBatch,
    cp: ContextParallel,
    outputs: Outputs,
    temperature: float,
    *,
    rows: bool,
    routing: ExpertRouting | None = None,
) -> ModelInputs:
    """This rank's slice of a micro-batch, padded to ``mb.padded_length``.

    Args:
        temperature: for every token, unless the batch has a per-sequence key ``temperature``.
        rows: run one sequence per row instead of packed.
        routing: of an engine whose model may have experts.
    """
    device = mb.cu_seqlens.device
    length = mb.padded_length
    grid = _rows(mb.seqlens, device) if rows else None
    return ModelInputs(
        input_ids=cp.shard(_pad(mb.data["input_ids"], length, 0)),
        position_ids=cp.shard(position_ids(mb.seqlens, length, device)),
        targets=cp.shard(_pad(mb.data["target_ids"], length, IGNORE_INDEX)),
        temperature=_temperature(mb, cp, temperature),
        layout=None if rows else cp.layout(mb.seqlens, length, device),
        rows=grid,
        outputs=outputs,
        wanted=cp.shard(_pad(mb.data["output_mask"], length, False)) if "output_mask" in mb.data else None,
        routing=routing.of(mb, grid, record=ROUTED_EXPERTS in outputs) if routing else None,
    )


def _pad(x: Tensor, length: int, value: float) -> Tensor:
    if len(x) == length:
        return x
    return torch.cat([x, x.new_full((length - len(x), *x.shape[1:]), value)])


def check_temperature(plan: BatchPlan) -> None:
    """Refuse a key ``temperature`` that is not one number per sequence.

    Raises:
        ValueError: says what it is.
    """
    found = {**plan.tokens, **plan.sequences}.get("temperature")
    if found is not None and ("temperature" in plan.tokens or found.dim() != 1):
        raise ValueError("key 'temperature' is not one number per sequence: pass [B], or a scalar in each sample")


def _temperature(mb: MicroBatch, cp: ContextParallel, default: float) -> float | Tensor:
    if "temperature" not in mb.data:
        return default
    per_sequence = mb.data["temperature"]
    lengths = mb.cu_seqlens.diff()
    per_token = per_sequence.repeat_interleave(lengths, output_size=mb.n_tokens)
    return cp.shard(_pad(per_token, mb.padded_length, 1.0))


def _rows(seqlens: tuple[int, ...], device: torch.device) -> tuple[Tensor, int, int]:
    width = max(seqlens)
    where = torch.cat([torch.arange(length) + row * width for row, length in enumerate(seqlens)])
    return where.to(device), len(seqlens), width
