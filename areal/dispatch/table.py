"""How each member of the engine's interface is dispatched to the ranks. The code reads this table, and the docs print it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from areal.dispatch.shared_devices.uses import Use


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
class Depends:
    """Use of the engine that depends on the arguments.

    Attributes:
        choose: returns the use.
        text: description for the docs.
    """

    choose: Callable[[Mapping[str, Any]], Use]
    text: str


@dataclass(frozen=True)
class Route:
    """How one member is dispatched.

    Attributes:
        use: use of the engine, which decides what is on a shared device during the call. ``None`` for members that need no state.
    """

    sent: Sent
    returned: Returned
    use: Use | Depends | None = None

    def use_with(self, arguments: Mapping[str, Any]) -> Use | None:
        """Return the use of a call."""
        return self.use.choose(arguments) if isinstance(self.use, Depends) else self.use


_PASS = Depends(
    lambda arguments: Use.FORWARD if arguments.get("forward_only") else Use.FORWARD_BACKWARD,
    "`FORWARD_BACKWARD`; with `forward_only` `FORWARD`",
)
_SAVE = Depends(
    lambda arguments: Use.CHECKPOINT if arguments["meta"].has_optimizer else Use.SYNC,
    "`CHECKPOINT`; without the optimizer `SYNC`",
)
_ONLOAD = Depends(
    lambda arguments: Use.ALL if arguments.get("grads", True) or arguments.get("optimizer", True) else Use.SYNC,
    "`ALL`; with `params` only `SYNC`",
)


def _shards(returned: Returned, use: Use | None) -> Route:
    return Route(Sent.SHARDS, returned, use)


def _all(use: Use | Depends | None = None) -> Route:
    return Route(Sent.SAME, Returned.RANK_0, use)


_CONTEXT = Route(Sent.SAME, Returned.CONTEXT)
_DRIVER = Route(Sent.NOTHING, Returned.DRIVER)

TABLE: dict[str, Route] = {
    "train_batch": _shards(Returned.STEP, Use.STEP),
    "forward_backward": _shards(Returned.STEP, Use.FORWARD_BACKWARD),
    "eval_batch": _shards(Returned.STEP, Use.EVAL),
    "forward_batch": _shards(Returned.SAMPLES, Use.FORWARD),
    "microbatches": _shards(Returned.LAYOUT, None),
    "global_weight": Route(Sent.MICROBATCHES, Returned.RANK_0),
    "forward_backward_batch": Route(Sent.MICROBATCHES, Returned.MICROBATCHES, _PASS),
    "initialize": _all(Use.ALL),
    "destroy": _all(),
    "optimizer_step": _all(Use.STEP),
    "zero_grad": _all(Use.ZERO_GRAD),
    "set_lr": _all(),
    "set_version": _all(),
    "offload": _all(Use.CHANGE),
    "onload": _all(_ONLOAD),
    "memory": Route(Sent.SAME, Returned.RANKS),
    "save": _all(_SAVE),
    "load": _all(Use.ALL),
    "wait_for_checkpoint": _all(),
    "lr": _all(),
    "named_tensors": Route(Sent.SAME, Returned.STREAM, Use.SYNC),
    "named_gradients": Route(Sent.SAME, Returned.STREAM, Use.FORWARD_BACKWARD),
    "start": Route(Sent.LIKE_VERB, Returned.FUTURE),
    "reference": _CONTEXT,
    "profile": Route(Sent.SAME, Returned.FOLDERS),
    "adapters": _DRIVER,
    "adapters.names": _all(),
    "adapters.selected": _all(),
    "adapters.add": _all(Use.CHANGE),
    "adapters.select": _all(),
    "adapters.remove": _all(Use.CHANGE),
    "adapters.save": _all(),
    "adapters.load": _all(Use.CHANGE),
    "adapters.named_tensors": Route(Sent.SAME, Returned.STREAM),
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
    groups: dict[tuple[str, str], list[str]] = {}
    for name, row in TABLE.items():
        groups.setdefault((row.sent.value, row.returned.value), []).append(f"`{name}`")
    lines = ["| members | sent to the ranks | returned |", "| --- | --- | --- |"]
    lines += [f"| {', '.join(names)} | {sent} | {returned} |" for (sent, returned), names in groups.items()]
    return "\n".join(lines)


def use_table() -> str:
    """Format the uses of all members in Markdown."""
    groups: dict[str, list[str]] = {}
    for name, row in TABLE.items():
        if row.use is not None:
            text = row.use.text if isinstance(row.use, Depends) else f"`{row.use.name}`"
            groups.setdefault(text, []).append(f"`{name}`")
    lines = ["| members | use |", "| --- | --- |"]
    return "\n".join([*lines, *(f"| {', '.join(names)} | {text} |" for text, names in groups.items())])


if __name__ == "__main__":
    print(dispatch_table(), use_table(), sep="\n\n")
