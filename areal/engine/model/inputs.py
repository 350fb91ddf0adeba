"""Convert a micro-batch to the inputs of one rank's model."""

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
    """Return this rank's slice of a micro-batch, padded to ``mb.padded_length``.

    Args:
        mb: the micro-batch.
        cp: the ranks that the token stream is split over.
        outputs: per-token outputs to compute.
        temperature: for all tokens, unless the batch has a per-sequence key ``temperature``.
        rows: run one sequence per row instead of packed.
        routing: expert routing of the engine, if its model may have experts.
    """
    device, length = mb.cu_seqlens.device, mb.padded_length
    grid = _row_grid(mb.seqlens, device) if rows else None
    # The tokens that the model computes: the packed sequences, or with shared prefixes each common token once.
    stream = TokenStream.of(mb.seqlens, length, mb.tree)
    ids = mb.data["input_ids"] if mb.tree is None else mb.data["input_ids"][mb.tree.tokens.to(device)]
    output_rows = None if mb.tree is None else OutputRows.of(mb.tree, length, cp)

    def for_outputs(x: Tensor, padding: float) -> Tensor:
        """Select from a packed key ``[T, ...]`` the values of this rank's output rows."""
        return cp.shard(_pad(x, length, padding)) if output_rows is None else x[output_rows.packed_index.to(x.device)]

    # Targets and positions were computed from complete sequences. Only now the stream is sliced over ranks.
    return ModelInputs(
        input_ids=cp.shard(_pad(ids, length, 0)),
        position_ids=cp.shard(stream.positions().to(device)),
        targets=for_outputs(mb.data["target_ids"], IGNORE_INDEX),
        temperature=for_outputs(_per_token(mb, "temperature"), 1.0) if "temperature" in mb.data else temperature,
        layout=None if rows else cp.layout(stream, device),
        rows=grid,
        outputs=outputs,
        # Counted on the host: on a GPU, nonzero() would wait for the device.
        wanted=None if mb.wanted is None else for_outputs(mb.wanted, False).nonzero().squeeze(1).to(device),
        output_rows=None if output_rows is None else output_rows.local_index.to(device),
        routing=routing.of(mb, grid, record=ROUTED_EXPERTS in outputs) if routing else None,
    )


def _pad(x: Tensor, length: int, value: float) -> Tensor:
    if len(x) == length:
        return x
    return torch.cat([x, x.new_full((length - len(x), *x.shape[1:]), value)])


def check_temperature(plan: BatchPlan) -> None:
    """Raise if the key ``temperature`` is not one number per sequence.

    Raises:
        ValueError: the key is per-token, or has more than one value per sequence.
    """
    temperature = {**plan.tokens, **plan.sequences}.get("temperature")
    if temperature is not None and ("temperature" in plan.tokens or temperature.dim() != 1):
        raise ValueError("key 'temperature' is not one number per sequence: pass [B], or a scalar in each sample")


def _per_token(mb: MicroBatch, key: str) -> Tensor:
    """Expand a per-sequence key ``[n]`` to the packed tokens, ``[T]``."""
    # The output size is known on the host; without it, repeat_interleave would wait for the device.
    return mb.data[key].repeat_interleave(mb.cu_seqlens.diff(), output_size=mb.n_tokens)


def _row_grid(seqlens: tuple[int, ...], device: torch.device) -> tuple[Tensor, int, int]:
    """Return the index of each packed token in a grid of one sequence per row, and the grid's rows and columns."""
    width = max(seqlens)
    grid_index = torch.cat([torch.arange(length) + row * width for row, length in enumerate(seqlens)])
    return grid_index.to(device), len(seqlens), width
