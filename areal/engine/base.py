"""The training step, written once. Read it from top to bottom.

``forward_backward_batch`` is the only verb that runs the model, and no engine overrides it. An engine fills three hooks:
``_build``, which composes the parts that vary (model, schedule, context parallelism, optimizer, checkpointer),
``_forward_compute_mb``, one micro-batch through the model, and ``_finalize_grads``, the reduction still owed before an
optimizer step. Hooks are leaves: they take values, return values, and never call back up.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from areal.api.batch import OptimStats, StepOutput, TokenOutputs
from areal.api.config import BackendConfig, FinetuneSpec, TrainEngineConfig
from areal.api.engine import BatchInput, Outputs, default_loss_weight
from areal.api.loss import LossFn, LossWeightFn, Normalization, ProcessOutputFn
from areal.api.microbatch import MicroBatch, MicroBatchList
from areal.engine.components import EngineComponents, StepOptimizer
from areal.engine.faults import Faults, check_loss, zero_gradient_loss
from areal.engine.loss_step import LossStep, OutputStep, check_normalization, check_outputs, step_output
from areal.engine.model.inputs import check_temperature
from areal.engine.model.outputs import gather_outputs
from areal.engine.options import TEMPLATE_OPTIONS, engine_config
from areal.engine.pipeline_broadcast import Stages, broadcast_results, pack_results
from areal.engine.state import EngineState
from areal.engine.step_sync import StepSync
from areal.utils import platform
from areal.utils.data import BatchPlan, plan_batch
from areal.utils.distributed import ControlPlane, build_mesh, destroy_groups, init_default_group
from areal.utils.profiling.phase_timer import PhaseTimer, TimedCall
from areal.utils.seeding import seed_everything

_DISCARDED = "all pending gradients were discarded; the engine can be used for the next call"


class BaseTrainEngine(EngineState):
    """The template. Args: ``config``, whose layout must be one that the engine has (``layout_letters``)."""

    layout_letters: ClassVar[frozenset[str]]
    """Letters of :data:`areal.api.parallel.LETTERS` that the engine can use."""
    supported_options: ClassVar[frozenset[str]] = TEMPLATE_OPTIONS
    """Dotted names of the options that the engine honours; others must have their defaults."""
    config_class: ClassVar[type[BackendConfig]] = BackendConfig
    """Type of the engine's section in :class:`TrainEngineConfig`; without fields by default."""

    # ---- hooks

    @abstractmethod
    def _build(self, spec: FinetuneSpec) -> EngineComponents:
        """Compose the parts. ``mesh``, ``control``, ``device`` and ``timer`` are there."""

    @abstractmethod
    def _forward_compute_mb(
        self, model: nn.Module, mb: MicroBatch, *, outputs: Outputs, hidden: Tensor | None = None
    ) -> Any:
        """One micro-batch through one model chunk: a hidden state off the last stage, this rank's ``TokenOutputs`` on it."""

    @abstractmethod
    def _finalize_grads(self) -> None:
        """The gradient reduction still owed. Called once, from ``optimizer_step`` or ``named_gradients``."""

    # ---- life

    def __init__(self, config: TrainEngineConfig) -> None:
        self.config = engine_config(type(self), config)
        self.dims = config.dims
        self.dims.check_supported(self.layout_letters)
        self._last_stage = self.dims.pp - 1  # the pipeline rank that has it
        self.version = 0
        self.device = platform.current_device()
        self.timer = PhaseTimer(self.device)
        self.mesh: DeviceMesh
        self._parts: EngineComponents | None = None
        self._unusable = "it is not initialized: call initialize(FinetuneSpec(...))"
        self._closers: list[Callable[[], None]] = []
        self._started = False
        self._onloaded = 0

    def initialize(self, spec: FinetuneSpec) -> None:
        if self._parts is not None:
            raise RuntimeError("the engine is already initialized: destroy it, or make another")
        init_default_group()
        self.dims.check_world(dist.get_world_size())
        platform.set_device(self.device)
        if self.config.deterministic:
            torch.use_deterministic_algorithms(True)
        self.control, self._started = ControlPlane(), True
        self.mesh = build_mesh(self.dims, self.device.type)
        self._closers = [functools.partial(destroy_groups, self.mesh)]
        self._stages = Stages(self.mesh["pp"], self._last_stage)
        self._agreement = StepSync(self.control, self.mesh, self._last_stage)
        seed_everything(self.config.seed + self.dp_rank)
        error: Exception | None = None
        try:
            self._parts = self._build(spec)
        except Exception as caught:
            error = caught
        try:
            self.control.settle(error, "the engine was not built")
        except Exception:
            self._teardown("it was not built: make another")
            self.control.close()
            raise

    def destroy(self) -> None:
        try:
            if self._parts is not None:
                self._parts.checkpointer.wait()
        finally:
            if self._closers:
                self._teardown("it was destroyed: make another")
            if self._started:
                self.control.close()

    def _teardown(self, why: str) -> None:
        if self._parts is not None:
            self._parts.forget()
        self._parts, self._unusable = None, why
        gc.collect()
        while self._closers:
            self._closers.pop()()
        gc.collect()  # groups are in cycles, and their connections close with the last reference
        platform.empty_cache(self.device)

    def _require_components(self) -> EngineComponents:
        if self._parts is None:
            raise RuntimeError(f"the engine cannot be used: {self._unusable}")
        return self._parts

    @property
    def dp_rank(self) -> int:
        return self.mesh["dp"].get_local_rank()

    @property
    def dp_size(self) -> int:
        return self.dims.dp

    @property
    def dp_group(self) -> dist.ProcessGroup:
        return self.mesh["dp"].get_group()

    @property
    def is_main(self) -> bool:
        return all(self.mesh[axis].get_local_rank() == 0 for axis in ("pp", "cp", "tp"))

    def set_version(self, version: int) -> None:
        self.version = version

    # ---- a batch

    def microbatches(self, batch: BatchInput) -> MicroBatchList:
        return self._prepare(batch, outputs=("logprobs",))

    def _prepare(self, batch: BatchInput, outputs: Outputs) -> MicroBatchList:
        parts = self._require_components()
        schedule, align = parts.schedule, parts.align

        def plan_here() -> BatchPlan:
            check_outputs(outputs, value_head=self.config.value_head)
            plan = plan_batch(batch, self.config.mb_spec, align=align, vocab_size=parts.vocab_size)
            check_temperature(plan)
            parts.routing.check(plan, outputs)
            return plan

        plan, n_mbs, longest = self._agreement.plan(plan_here, schedule)
        padded_length = longest if schedule.equal_lengths else None
        return plan.build(n_mbs=n_mbs, device=self.device, padded_length=padded_length)

    def global_sum(self, x: Tensor) -> Tensor:
        total = x.detach().clone().to(self.device)
        dist.all_reduce(total, group=self.dp_group)
        return total.to(x.device)

    def global_weight(
        self, mbs: MicroBatchList, loss_weight_fn: LossWeightFn = default_loss_weight
    ) -> Tensor | dict[str, Tensor]:
        weights = self._agreement.weights(mbs, loss_weight_fn, required=True)
        totals = {name: torch.tensor(total, dtype=torch.float64) for name, total in weights.total.items()}
        return next(iter(totals.values())) if weights.plain else totals

    # ---- the verb under all the others

    def forward_backward_batch(
        self,
        mbs: MicroBatchList,
        process_output: ProcessOutputFn,
        *,
        outputs: Outputs = ("logprobs",),
        forward_only: bool = False,
    ) -> list[Any]:
        check_outputs(outputs, value_head=self.config.value_head)
        faults, results, parts = Faults(), {}, self._require_components()
        parts.routing.check_outputs(outputs)
        gradients = None if forward_only else parts.gradients
        self._onload(grads=not forward_only)
        if gradients is not None:
            parts.before_backward()
        try:
            results = self._run_schedule(mbs, process_output, outputs, forward_only, faults)
        except Exception as error:  # The model itself failed, perhaps on this rank alone.
            faults.break_off(error)
        if faults.broken:
            self._abort_groups(f"its model failed: {faults.first}")
        parcel = pack_results(results, self._stages, faults)
        self._settle(faults.first, keep=forward_only)
        results = broadcast_results(results, parcel, self._stages, self.device)
        if gradients is not None:
            gradients.set(accumulated=True)
        return [results[mb.index] for mb in mbs.real]

    def _onload(self, *, grads: bool = False, optimizer: bool = False) -> None:
        """Bring back what a call needs, which its statistics will say."""
        self._onloaded += self._require_components().memory.onload(params=True, grads=grads, optimizer=optimizer)

    def _run_schedule(
        self, mbs: MicroBatchList, process_output: ProcessOutputFn, outputs: Outputs, forward_only: bool, faults: Faults
    ) -> dict[int, Any]:
        """The two halves of a micro-batch, handed to the schedule."""
        parts, timer = self._require_components(), self.timer
        scale = parts.schedule.grad_scale(len(mbs))

        def forward(model: nn.Module, mb: MicroBatch, hidden: Tensor | None = None) -> Any:
            faults.at = mb
            return self._forward_compute_mb(model, mb, outputs=outputs, hidden=hidden)

        def process(local: TokenOutputs, mb: MicroBatch) -> tuple[Tensor | None, Any]:
            tokens = gather_outputs(local, parts.context_parallel, mb)
            loss, result = None, None
            if not mb.filler and faults.first is None:
                with faults.held():  # The others are in collectives: stay in step, add nothing, raise at the end.
                    returned, result = process_output(tokens, mb)
                    loss = None if forward_only else check_loss(returned, mb)
            if forward_only:
                return None, result
            return (zero_gradient_loss(tokens) if loss is None else loss * scale), result

        halves = timer.timed("forward", forward), timer.timed("forward", process)
        rest = "forward" if forward_only else "backward"  # what a schedule does beside the two
        with torch.set_grad_enabled(not forward_only), timer.phase(rest, label="schedule"):
            return parts.schedule.run(mbs, *halves, forward_only=forward_only)

    def _settle(self, error: Exception | None, *, keep: bool) -> None:
        """Raise on every rank what any rank met."""
        note = ("" if keep else _DISCARDED) if self._parts else "the engine cannot be used any more: make another"
        with self._discarding_grads(unless=keep):
            self.control.settle(error, note)

    @contextlib.contextmanager
    def _discarding_grads(self, *, unless: bool) -> Iterator[None]:
        """An error inside leaves no half-made gradients behind."""
        try:
            yield
        except Exception:
            if self._parts is not None and not unless:
                self.zero_grad()
            raise

    def _abort_groups(self, why: str) -> None:
        """Peers may wait in collectives that this rank will not reach: close its groups, and they fail at once too."""
        if self.dims.world_size > 1 or not self._require_components().recover():
            self._teardown(why)
        platform.empty_cache(self.device)

    # ---- thin wrappers

    def forward_backward(
        self,
        batch: BatchInput,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn = default_loss_weight,
        *,
        outputs: Outputs = ("logprobs",),
        normalization: Normalization = "weight",
        loss_weight: float = 1.0,
    ) -> StepOutput:
        with self.timer.call() as call:
            return self._loss_batch(
                call, batch, loss_fn, loss_weight_fn, outputs, normalization, loss_weight, forward_only=False
            )

    def train_batch(
        self,
        batch: BatchInput,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn = default_loss_weight,
        *,
        outputs: Outputs = ("logprobs",),
    ) -> StepOutput:
        self._require_optimizer()
        if self._require_components().gradients.accumulated:
            raise RuntimeError("train_batch with pending gradients: call optimizer_step() or zero_grad() first")
        with self.timer.call() as call:
            self._onload(grads=True, optimizer=True)
            with self._require_components().last_call():
                step = self.forward_backward(batch, loss_fn, loss_weight_fn, outputs=outputs)
            stats = self.optimizer_step()
            seconds, timings = max(self.control.gather(call.read()), key=lambda taken: taken[0])
        return dataclasses.replace(step, **vars(stats), seconds=seconds, timings=timings)

    def eval_batch(
        self,
        batch: BatchInput,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn = default_loss_weight,
        *,
        outputs: Outputs = ("logprobs",),
    ) -> StepOutput:
        with self.timer.call() as call, self._require_components().evaluating():
            return self._loss_batch(call, batch, loss_fn, loss_weight_fn, outputs, "weight", 1.0, forward_only=True)

    def forward_batch(self, batch: BatchInput, *, outputs: Outputs = ("logprobs",)) -> Any:
        mbs = self._prepare(batch, outputs)
        with self._require_components().evaluating():
            results = self.forward_backward_batch(mbs, OutputStep(outputs), outputs=outputs, forward_only=True)
        return mbs.restore(results)

    def _loss_batch(
        self,
        call: TimedCall,
        batch: BatchInput,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn,
        outputs: Outputs,
        normalization: Normalization,
        loss_weight: float,
        *,
        forward_only: bool,
    ) -> StepOutput:
        parts = self._require_components()
        check_normalization(normalization, loss_weight)
        mbs = self._prepare(batch, outputs)
        weights = self._agreement.weights(mbs, loss_weight_fn, required=normalization == "weight")
        by_weight, number = normalization == "weight", 1.0 if isinstance(normalization, str) else float(normalization)
        totals = parts.routing.with_terms(weights.total, weights.sequences, weights.tokens)
        divisors = {name: total if by_weight else number for name, total in totals.items()}
        process = LossStep(loss_fn, weights, divisors, loss_weight)
        with parts.routing.counting(divisors, loss_weight * parts.schedule.grad_scale(len(mbs))) as tally:
            results = self.forward_backward_batch(mbs, process, outputs=outputs, forward_only=forward_only)
        with self._discarding_grads(unless=forward_only):
            note = "" if forward_only else _DISCARDED
            summary = self._agreement.summary(mbs, results, tally, call, note, self._onloaded)
        self._onloaded = 0
        may_drop = self.config.mb_spec.overlong == "drop"
        return step_output(summary, weights, divisors, loss_weight, n_mbs=len(mbs), may_drop=may_drop)

    # ---- optimizer

    def _require_optimizer(self) -> StepOptimizer:
        optimizer = self._require_components().optimizer
        if optimizer is None:
            raise RuntimeError(
                "the engine has no optimizer: set TrainEngineConfig.optimizer=OptimizerConfig(...) to train"
            )
        return optimizer

    def _require_gradients(self) -> EngineComponents:
        parts = self._require_components()
        if not parts.gradients.accumulated:
            raise RuntimeError("no gradient is pending: call forward_backward() first")
        if not parts.gradients.reduced:
            parts.memory.onload(params=False, grads=True, optimizer=False)
            with self.timer.phase("reduce"):
                if parts.adapters is None:
                    self._finalize_grads()
                else:
                    parts.adapters.current.sum_gradients()
            parts.gradients.set(accumulated=True, reduced=True)
        return parts

    def zero_grad(self) -> None:
        parts = self._require_components()
        parts.zero_grad()
        parts.gradients.set(accumulated=False)

    def optimizer_step(self) -> OptimStats:
        optimizer = self._require_optimizer()
        self._require_gradients().memory.onload(params=True, grads=True, optimizer=True)
        with self.timer.phase("optimizer"):
            stats = optimizer.step()
            self.zero_grad()
        return stats

    @property
    def lr(self) -> float:
        return self._require_optimizer().lr

    def set_lr(self, lr: float) -> None:
        self._require_optimizer().set_lr(lr)
