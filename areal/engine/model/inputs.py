"""From a micro-batch to what one rank feeds its model."""

from __future__ import annotations

import torch
from torch import Tensor

from areal.api.batch import IGNORE_INDEX
from areal.api.engine import Outputs
from areal.api.microbatch import MicroBatch
from areal.engine.attention.context_parallel import ContextParallel
from areal.engine.attention.token_stream import TokenStream
from areal.engine.model.outputs import OutputRows
from areal.engine.model.packed_lm import ModelInputs
from areal.engine.moe.routing import ROUTED_EXPERTS, ExpertRouting
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
    device, length = mb.cu_seqlens.device, mb.padded_length
    grid = _rows(mb.seqlens, device) if rows else None
    branches = TokenStream.of(mb.seqlens, length, mb.tree)
    ids = mb.data["input_ids"] if mb.tree is None else mb.data["input_ids"][mb.tree.tokens.to(device)]
    scored = None if mb.tree is None else OutputRows.of(mb.tree, length, cp)

    def asked(x: Tensor, padding: float) -> Tensor:
        """What packed tokens ``[T, ...]`` ask, by the rows that answer on this rank."""
        return cp.shard(_pad(x, length, padding)) if scored is None else x[scored.packed.to(x.device)]

    return ModelInputs(
        input_ids=cp.shard(_pad(ids, length, 0)),
        position_ids=cp.shard(branches.positions().to(device)),
        targets=asked(mb.data["target_ids"], IGNORE_INDEX),
        temperature=asked(_per_token(mb, "temperature"), 1.0) if "temperature" in mb.data else temperature,
        layout=None if rows else cp.layout(branches, device),
        rows=grid,
        outputs=outputs,
        # Found on the host: on a GPU, counting them would wait for the device.
        wanted=None if mb.wanted is None else asked(mb.wanted, False).nonzero().squeeze(1).to(device),
        scored=None if scored is None else scored.places.to(device),
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


def _per_token(mb: MicroBatch, key: str) -> Tensor:
    """A per-sequence key ``[n]`` for each of the packed tokens."""
    return mb.data[key].repeat_interleave(mb.cu_seqlens.diff(), output_size=mb.n_tokens)


def _rows(seqlens: tuple[int, ...], device: torch.device) -> tuple[Tensor, int, int]:
    width = max(seqlens)
    where = torch.cat([torch.arange(length) + row * width for row, length in enumerate(seqlens)])
    return where.to(device), len(seqlens), width
