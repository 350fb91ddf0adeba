"""How each member of the engine's interface is dispatched to the ranks. The code reads this table, and the docs print it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from torch import Tensor

from areal.api import (
    EngineMemory,
    LoRAConfig,
    LossFn,
    LossObjective,
    LossWeightFn,
    MicroBatchList,
    MicroBatchSpec,
    NamedTensor,
    OptimStats,
    SaveLoadMeta,
    StepOutput,
    StepSettings,
    TrainEngine,
    default_loss_weight,
)
from areal.api.engine import BatchInput, Outputs
from areal.api.loss import Normalization, ProcessOutputFn
from areal.dispatch.shared_devices.uses import Use


class Sent(Enum):
    """Values that the ranks receive."""

    SHARDS = "one shard for each data-parallel coordinate"
    MICROBATCHES = "which of the micro-batches that they hold"
    TENSORS = "new tensors, once for all ranks"
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
    REFERENCES = "samples that all groups take by reference"
    STREAM = "a stream of rank 0, bounded in bytes; all ranks iterate at the same pace"
    CONTEXT = "a context that all ranks enter and leave, also after an error"
    FUTURE = "a future of what the verb returns"
    FOLDERS = "a context that all ranks or the named ones enter and leave, which gives the folder's path by rank"
    DRIVER = "the driver's own value, for one data-parallel shard"

    def __reduce_ex__(self, _: object) -> tuple[Any, ...]:
        # Calls carry the name, which is shorter than the text.
        return getattr, (Returned, self.name)


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
    "put": Route(Sent.TENSORS, Returned.REFERENCES),
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
    "evaluating": _CONTEXT,
    "profile": Route(Sent.SAME, Returned.FOLDERS),
    "adapters": _DRIVER,
    "adapters.names": _all(),
    "adapters.selected": _all(),
    "adapters.add": _all(Use.CHANGE),
    "adapters.select": _all(),
    "adapters.remove": _all(Use.CHANGE),
    "adapters.save": _all(),
    "adapters.load": _all(Use.CHANGE),
    "adapters.peft_config": _all(),
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
    "param_groups": _DRIVER,
    "global_sum": _DRIVER,
    "local_tensors": _DRIVER,
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


class DispatchedVerbs(TrainEngine):
    """Verbs of a group that are one call on all ranks, and nothing else: see :data:`TABLE`."""

    @abstractmethod
    def _call(self, name: str, /, **arguments: Any) -> Any:
        """Call a member on all ranks, and return its result."""

    # ---- batches

    def microbatches(self, batch: BatchInput, *, mb_spec: MicroBatchSpec | None = None) -> MicroBatchList:
        return self._call("microbatches", batch=batch, mb_spec=mb_spec)

    def global_weight(
        self, mbs: MicroBatchList, loss_weight_fn: LossWeightFn = default_loss_weight
    ) -> Tensor | dict[str, Tensor]:
        return self._call("global_weight", mbs=mbs, loss_weight_fn=loss_weight_fn)

    # ---- forward and backward

    def forward_backward_batch(
        self,
        mbs: MicroBatchList,
        process_output: ProcessOutputFn,
        *,
        outputs: Outputs = ("logprobs",),
        forward_only: bool = False,
    ) -> list[Any]:
        return self._call(
            "forward_backward_batch", mbs=mbs, process_output=process_output, outputs=outputs, forward_only=forward_only
        )

    def forward_backward(
        self,
        batch: BatchInput,
        loss_fn: LossFn | LossObjective,
        loss_weight_fn: LossWeightFn | None = None,
        *,
        outputs: Outputs | None = None,
        normalization: Normalization = "weight",
        loss_weight: float = 1.0,
        returns: Outputs = (),
        mb_spec: MicroBatchSpec | None = None,
    ) -> StepOutput:
        loss = {"loss_fn": loss_fn, "loss_weight_fn": loss_weight_fn, "outputs": outputs, "returns": returns}
        return self._call(
            "forward_backward",
            batch=batch,
            **loss,
            normalization=normalization,
            loss_weight=loss_weight,
            mb_spec=mb_spec,
        )

    def train_batch(
        self,
        batch: BatchInput,
        loss_fn: LossFn | LossObjective,
        loss_weight_fn: LossWeightFn | None = None,
        *,
        outputs: Outputs | None = None,
        returns: Outputs = (),
        mb_spec: MicroBatchSpec | None = None,
    ) -> StepOutput:
        loss = {"loss_fn": loss_fn, "loss_weight_fn": loss_weight_fn, "outputs": outputs, "returns": returns}
        return self._call("train_batch", batch=batch, **loss, mb_spec=mb_spec)

    def eval_batch(
        self,
        batch: BatchInput,
        loss_fn: LossFn | LossObjective,
        loss_weight_fn: LossWeightFn | None = None,
        *,
        outputs: Outputs | None = None,
        returns: Outputs = (),
        mb_spec: MicroBatchSpec | None = None,
    ) -> StepOutput:
        loss = {"loss_fn": loss_fn, "loss_weight_fn": loss_weight_fn, "outputs": outputs, "returns": returns}
        return self._call("eval_batch", batch=batch, **loss, mb_spec=mb_spec)

    def forward_batch(
        self, batch: BatchInput, *, outputs: Outputs = ("logprobs",), mb_spec: MicroBatchSpec | None = None
    ) -> Any:
        return self._call("forward_batch", batch=batch, outputs=outputs, mb_spec=mb_spec)

    # ---- optimizer

    def zero_grad(self) -> None:
        self._call("zero_grad")

    def optimizer_step(self, settings: StepSettings | None = None) -> OptimStats:
        return self._call("optimizer_step", settings=settings)

    @property
    def lr(self) -> float:
        return self._call("lr")

    def set_lr(self, lr: float) -> None:
        self._call("set_lr", lr=lr)

    # ---- checkpoints

    def save(self, meta: SaveLoadMeta) -> None:
        self._call("save", meta=meta)

    def load(self, meta: SaveLoadMeta) -> None:
        self._call("load", meta=meta)

    def wait_for_checkpoint(self) -> None:
        self._call("wait_for_checkpoint")

    # ---- memory

    def offload(self, *, params: bool = True, grads: bool = True, optimizer: bool = True) -> None:
        self._call("offload", params=params, grads=grads, optimizer=optimizer)

    def onload(self, *, params: bool = True, grads: bool = True, optimizer: bool = True) -> None:
        self._call("onload", params=params, grads=grads, optimizer=optimizer)

    def memory(self) -> list[EngineMemory]:
        return self._call("memory")


class GroupAdapters:
    """Implements :class:`areal.api.Adapters` by calls to all ranks, which get absolute paths: their directory may not be the driver's.

    Args:
        call: calls a member by its name, ``adapters.`` included, with keyword arguments.
        stream: the same for a stream of tensors.
    """

    def __init__(self, call: Callable[..., Any], stream: Callable[..., Any]) -> None:
        self._call, self._stream = call, stream

    @property
    def names(self) -> tuple[str, ...]:
        return self._call("adapters.names")

    @property
    def selected(self) -> str:
        return self._call("adapters.selected")

    def add(self, name: str, lora: LoRAConfig | None = None, *, seed: int | None = None) -> None:
        self._call("adapters.add", name=name, lora=lora, seed=seed)

    def select(self, name: str) -> None:
        self._call("adapters.select", name=name)

    def remove(self, name: str) -> None:
        self._call("adapters.remove", name=name)

    def save(
        self, name: str, path: str | Path, *, with_optim: bool = False, about: Mapping[str, Any] | None = None
    ) -> None:
        self._call("adapters.save", name=name, path=Path(path).absolute(), with_optim=with_optim, about=about)

    def load(self, name: str, path: str | Path, *, with_optim: bool = False) -> None:
        self._call("adapters.load", name=name, path=Path(path).absolute(), with_optim=with_optim)

    def peft_config(self) -> dict[str, Any]:
        return self._call("adapters.peft_config")

    def named_tensors(self) -> Iterator[NamedTensor]:
        return self._stream("adapters.named_tensors")


if __name__ == "__main__":
    print(dispatch_table(), use_table(), sep="\n\n")
