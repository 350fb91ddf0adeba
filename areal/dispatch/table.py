"""How each member of the engine's interface is dispatched to the ranks. The code reads this table, and the docs print it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Sent(Enum):
    """Values that the ranks receive."""

    SHARDS = "one shard for each data-parallel coordinate"
    MICROBATCHES = "which of the micro-batches that they hold"
    SAME = "the same arguments"
    NOTHING = "nothing"
    LIKE_VERB = "as for the verb that it starts"


class Returned(Enum):
    """Value that the driver returns."""

    RANK_0 = "result of rank 0"
    RANKS = "one result for each rank"
    STEP = "result of rank 0, with per-token outputs in the caller's order, form and device, from one rank of each coordinate"
    SAMPLES = "results in the caller's order, form and device, from one rank of each coordinate"
    MICROBATCHES = "one result for each micro-batch, in the order of the coordinates"
    LAYOUT = "the layout of the micro-batches, which stay on the ranks"
    STREAM = "a stream of rank 0, bounded in bytes; all ranks iterate at the same pace"
    CONTEXT = "a context that all ranks enter and leave, also after an error"
    FUTURE = "a future of what the verb returns"
    FOLDERS = "a context that all ranks or the named ones enter and leave, which gives the folder's path by rank"
    DRIVER = "the driver's own value, for one data-parallel shard"


@dataclass(frozen=True)
class Route:
    """How one member is dispatched."""

    sent: Sent
    returned: Returned


_STEP = Route(Sent.SHARDS, Returned.STEP)
_ALL = Route(Sent.SAME, Returned.RANK_0)
_STREAM = Route(Sent.SAME, Returned.STREAM)
_CONTEXT = Route(Sent.SAME, Returned.CONTEXT)
_DRIVER = Route(Sent.NOTHING, Returned.DRIVER)

TABLE: dict[str, Route] = {
    "train_batch": _STEP,
    "forward_backward": _STEP,
    "eval_batch": _STEP,
    "forward_batch": Route(Sent.SHARDS, Returned.SAMPLES),
    "microbatches": Route(Sent.SHARDS, Returned.LAYOUT),
    "global_weight": Route(Sent.MICROBATCHES, Returned.RANK_0),
    "forward_backward_batch": Route(Sent.MICROBATCHES, Returned.MICROBATCHES),
    "initialize": _ALL,
    "destroy": _ALL,
    "optimizer_step": _ALL,
    "zero_grad": _ALL,
    "set_lr": _ALL,
    "set_version": _ALL,
    "offload": _ALL,
    "onload": _ALL,
    "memory": Route(Sent.SAME, Returned.RANKS),
    "save": _ALL,
    "load": _ALL,
    "wait_for_checkpoint": _ALL,
    "lr": _ALL,
    "named_tensors": _STREAM,
    "named_gradients": _STREAM,
    "start": Route(Sent.LIKE_VERB, Returned.FUTURE),
    "reference": _CONTEXT,
    "profile": Route(Sent.SAME, Returned.FOLDERS),
    "adapters": _DRIVER,
    "adapters.names": _ALL,
    "adapters.selected": _ALL,
    "adapters.add": _ALL,
    "adapters.select": _ALL,
    "adapters.remove": _ALL,
    "adapters.save": _ALL,
    "adapters.load": _ALL,
    "adapters.named_tensors": _STREAM,
    "config": _DRIVER,
    "control": _DRIVER,
    "dims": _DRIVER,
    "device": _DRIVER,
    "version": _DRIVER,
    "dp_rank": _DRIVER,
    "dp_size": _DRIVER,
    "dp_group": _DRIVER,
    "is_main": _DRIVER,
    "global_sum": _DRIVER,
}
"""Member of ``TrainEngine``, or of ``Adapters`` after ``adapters.``, by name."""


def dispatch_table() -> str:
    """Format the table in Markdown."""
    groups: dict[Route, list[str]] = {}
    for name, row in TABLE.items():
        groups.setdefault(row, []).append(f"`{name}`")
    lines = ["| members | sent to the ranks | returned |", "| --- | --- | --- |"]
    lines += [f"| {', '.join(names)} | {row.sent.value} | {row.returned.value} |" for row, names in groups.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    print(dispatch_table())
