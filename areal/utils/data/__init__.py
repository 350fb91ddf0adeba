"""Data: load samples, build and pad sequences, and pack a batch into micro-batches."""

from areal.utils.data.batch_plan import BatchPlan, plan_batch
from areal.utils.data.bins import ADAPTER
from areal.utils.data.columns import Columns, read_batch
from areal.utils.data.digest import checksum
from areal.utils.data.loader import ShardedLoader, sharded_loader
from areal.utils.data.packing import deal, deal_sharing, pack, sequence_cost
from areal.utils.data.padding import from_left_padded, pad, round_up, row_lengths, unpad
from areal.utils.data.segments import segment_mean, segment_sum
from areal.utils.data.sequences import (
    Segment,
    from_hf_labels,
    from_prompt_response,
    from_segments,
    to_responses,
    where_trained,
)

__all__ = [
    "ADAPTER",
    "BatchPlan",
    "Columns",
    "Segment",
    "ShardedLoader",
    "checksum",
    "deal",
    "deal_sharing",
    "from_hf_labels",
    "from_left_padded",
    "from_prompt_response",
    "from_segments",
    "pack",
    "pad",
    "plan_batch",
    "read_batch",
    "round_up",
    "row_lengths",
    "segment_mean",
    "segment_sum",
    "sequence_cost",
    "sharded_loader",
    "to_responses",
    "unpad",
    "where_trained",
]
