"""Convert a micro-batch to the inputs of one rank's model."""

from __future__ import annotations

from torch import Tensor

from areal.api.batch import IGNORE_INDEX
from areal.api.engine import Outputs
from areal.api.microbatch import MicroBatch
from areal.engine.attention.context_parallel import ContextParallel
from areal.engine.model.packed_lm import ModelInputs
from areal.engine.moe.routing import ExpertRouting
from areal.engine.moe.rules import ROUTED_EXPERTS
from areal.engine.stream.layout import layout_of, pad_rows


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
    # Index tensors were copied to the device with the batch: a copy here would wait for the previous micro-batch.
    layout, length = layout_of(mb, cp, rows=rows), mb.padded_length
    shared = layout.shared
    # The tokens that the model computes: the packed sequences, or with shared prefixes each common token once.
    ids = mb.data["input_ids"] if shared is None else mb.data["input_ids"][shared.tokens]

    def for_outputs(x: Tensor, padding: float) -> Tensor:
        """Select from a packed key ``[T, ...]`` the values of this rank's output rows."""
        return cp.shard(pad_rows(x, length, padding)) if shared is None else x[shared.outputs.packed_index]

    # Targets and positions were computed from complete sequences. Only now the stream is sliced over ranks.
    return ModelInputs(
        input_ids=cp.shard(pad_rows(ids, length, 0)),
        position_ids=layout.positions,
        targets=for_outputs(mb.data["target_ids"], IGNORE_INDEX),
        temperature=for_outputs(_per_token(mb, "temperature"), 1.0) if "temperature" in mb.data else temperature,
        layout=layout.attention(cp),
        rows=layout.rows,
        outputs=outputs,
        wanted=layout.wanted,
        output_rows=None if shared is None else shared.outputs.local_index,
        routing=routing.of(mb, layout, record=ROUTED_EXPERTS in outputs) if routing else None,
        adapters=layout.adapters,
    )


def _per_token(mb: MicroBatch, key: str) -> Tensor:
    """Expand a per-sequence key ``[n]`` to the packed tokens, ``[T]``."""
    # The output size is known on the host; without it, repeat_interleave would wait for the device.
    return mb.data[key].repeat_interleave(mb.cu_seqlens.diff(), output_size=mb.n_tokens)
