"""The verbs of a group that are one call on all ranks, and nothing else."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from torch import Tensor

from areal.api import (
    EngineMemory,
    LossFn,
    LossObjective,
    LossWeightFn,
    MicroBatchList,
    OptimStats,
    SaveLoadMeta,
    StepOutput,
    StepSettings,
    TrainEngine,
    default_loss_weight,
)
from areal.api.engine import BatchInput, Outputs
from areal.api.loss import Normalization, ProcessOutputFn


class DispatchedVerbs(TrainEngine):
    """Verbs that a table dispatches: see :data:`areal.dispatch.table.TABLE`."""

    @abstractmethod
    def _call(self, name: str, /, **arguments: Any) -> Any:
        """Call a member on all ranks, and return its result."""

    # ---- batches

    def microbatches(self, batch: BatchInput) -> MicroBatchList:
        return self._call("microbatches", batch=batch)

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
    ) -> StepOutput:
        loss = {"loss_fn": loss_fn, "loss_weight_fn": loss_weight_fn, "outputs": outputs, "returns": returns}
        return self._call("forward_backward", batch=batch, **loss, normalization=normalization, loss_weight=loss_weight)

    def train_batch(
        self,
        batch: BatchInput,
        loss_fn: LossFn | LossObjective,
        loss_weight_fn: LossWeightFn | None = None,
        *,
        outputs: Outputs | None = None,
        returns: Outputs = (),
    ) -> StepOutput:
        loss = {"loss_fn": loss_fn, "loss_weight_fn": loss_weight_fn, "outputs": outputs, "returns": returns}
        return self._call("train_batch", batch=batch, **loss)

    def eval_batch(
        self,
        batch: BatchInput,
        loss_fn: LossFn | LossObjective,
        loss_weight_fn: LossWeightFn | None = None,
        *,
        outputs: Outputs | None = None,
        returns: Outputs = (),
    ) -> StepOutput:
        loss = {"loss_fn": loss_fn, "loss_weight_fn": loss_weight_fn, "outputs": outputs, "returns": returns}
        return self._call("eval_batch", batch=batch, **loss)

    def forward_batch(self, batch: BatchInput, *, outputs: Outputs = ("logprobs",)) -> Any:
        return self._call("forward_batch", batch=batch, outputs=outputs)

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
        return [report for reports in self._call("memory") for report in reports]
