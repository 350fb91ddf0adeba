"""The training step of all engines, in the order of a call. Read it from top to bottom.

``forward_backward_batch`` is the only verb that runs the model, and no engine overrides it. An engine implements three hooks:
``_build`` composes what differs between engines (model, schedule, context parallelism, optimizer, checkpointer),
``_forward_compute_mb`` runs one micro-batch through the model, and ``_finalize_grads`` completes the reduction of gradients before an
optimizer step. Hooks are leaves: they take values, return values, and never call the template.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from areal.api.batch import OptimStats, StepOutput, TokenOutputs
from areal.api.config import FinetuneSpec
from areal.api.engine import BatchInput, Outputs, default_loss_weight
from areal.api.loss import LossFn, LossObjective, LossWeightFn, Normalization, ProcessOutputFn
from areal.api.microbatch import MicroBatch, MicroBatchList
from areal.api.sections.microbatch import MicroBatchSpec
from areal.api.step_settings import StepSettings
from areal.engine.batch_rules import BatchRules, check_one_adapter
from areal.engine.components import CallGradients, EngineComponents, call_gradients
from areal.engine.faults import Faults, check_loss, reach_all_heads, refusing_backward, zero_gradient_loss
from areal.engine.loss_call import LossCall
from areal.engine.loss_step import LossStep, OutputStep, loss_divisors, step_output
from areal.engine.memory_limit import Kind
from areal.engine.pipeline_broadcast import broadcast_results, pack_results
from areal.engine.state import EngineState
from areal.engine.stream.layout import StreamLayout, gather_outputs, layout_of
from areal.utils import platform
from areal.utils.distributed import EngineLostError
from areal.utils.profiling.phase_timer import TimedCall

logger = logging.getLogger(__name__)


class BaseTrainEngine(EngineState):
    """The template of all engines.

    Args:
        config: its layout must be one that the engine supports (``layout_letters``).
    """

    # ---- the three hooks

    @abstractmethod
    def _build(self, spec: FinetuneSpec) -> EngineComponents:
        """Build the components. ``mesh``, ``control``, ``device`` and ``timer`` exist already."""

    @abstractmethod
    def _forward_compute_mb(self, model: Any, mb: MicroBatch, *, outputs: Outputs, hidden: Tensor | None = None) -> Any:
        """Run one micro-batch through one model chunk: ``TokenOutputs`` of this rank on the last stage, else a hidden state."""

    @abstractmethod
    def _finalize_grads(self) -> None:
        """Complete the reduction of gradients. Called once, from ``optimizer_step`` or ``named_gradients``."""

    # ---- verbs with a loss

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
        self._require_optimizer()
        components = self._require_components()
        if components.gradients.state.accumulated:
            raise RuntimeError("train_batch with pending gradients: call optimizer_step() or zero_grad() first")
        call = LossCall.of(loss_fn, loss_weight_fn, outputs, returns=returns, mb_spec=mb_spec)
        with self.timer.call() as timed:
            # All transfers from host memory come first, where they are counted.
            self._onload_for_step(grads=True, optimizer=True)
            with components.schedule.last_call(), self.timer.call() as inner:
                step = self._loss_batch(inner, batch, call, steps=True)
            stats = self._apply_gradients()
            # The slowest rank is the one that the others waited for.
            seconds, timings = max(self.control.gather(timed.read()), key=lambda times: times[0])
        return dataclasses.replace(step, **vars(stats), seconds=seconds, timings=timings)

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
        call = LossCall.of(
            loss_fn,
            loss_weight_fn,
            outputs,
            returns=returns,
            normalization=normalization,
            loss_weight=loss_weight,
            mb_spec=mb_spec,
        )
        with self.timer.call() as timed:
            return self._loss_batch(timed, batch, call)

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
        call = LossCall.of(loss_fn, loss_weight_fn, outputs, returns=returns, mb_spec=mb_spec)
        with self.timer.call() as timed, self._require_components().evaluating():
            return self._loss_batch(timed, batch, call, forward_only=True)

    # ---- verb without a loss

    def forward_batch(
        self, batch: BatchInput, *, outputs: Outputs = ("logprobs",), mb_spec: MicroBatchSpec | None = None
    ) -> Any:
        mbs = self._prepare(batch, outputs, mb_spec, kind=(True, *outputs))
        with self._require_components().evaluating():
            results = self.forward_backward_batch(mbs, OutputStep(outputs), outputs=outputs, forward_only=True)
        return self._restored(mbs, results)

    def _restored(self, mbs: MicroBatchList, results: list[Any]) -> Any:
        """Return per-token results of micro-batches in the caller's order and form. Collective."""
        return mbs.restore(results, like=self._sync.result_of_a_peer(mbs, results))

    # ---- one call with a loss, in five steps

    def _loss_batch(
        self, timed: TimedCall, batch: BatchInput, call: LossCall, *, forward_only: bool = False, steps: bool = False
    ) -> StepOutput:
        components = self._require_components()

        # 1. Check the batch, cut it into micro-batches, and agree on their number with the other ranks.
        kind = (forward_only, *call.outputs)
        mbs = self._prepare(batch, call.outputs, call.mb_spec, kind=kind, returns=call.returns, with_loss=True)
        check_one_adapter(mbs.adapters, 1.0 if forward_only else call.normalization, steps=steps)

        # 2. Sum the loss weights over micro-batches and ranks: they are what each term of the loss is divided by.
        weights = self._sync.weights(mbs, call.weight_fn, required=call.normalization == "weight")
        totals = components.routing.with_terms(weights.total, weights.sequences, weights.tokens)
        divisors = loss_divisors(totals, call.normalization)

        # 3. Run all micro-batches forward and backward. Meanwhile, routers add the gradient of the balancing losses.
        # 4. For each micro-batch, the process function calls the loss function and divides its terms.
        loss_fn = self._additivity.watching(call.loss_fn, call.weight_fn) if self._sync.speaks else call.loss_fn
        process = LossStep(loss_fn, weights, divisors, call.loss_weight, call.returns)
        with components.routing.counting(
            divisors, call.loss_weight * components.schedule.grad_scale(len(mbs))
        ) as routed:
            results = self.forward_backward_batch(mbs, process, outputs=call.outputs, forward_only=forward_only)

        # 5. Sum the results over micro-batches and ranks. Per-token outputs stay on their rank.
        gradients = None if forward_only else call_gradients(components, mbs.adapters)
        with self._undoing(gradients):
            note = "" if gradients is None else gradients.on_error
            sums = self._sync.sum_results(mbs, results, routed, timed, note, self._moved)
        if gradients is not None:
            gradients.end()
        self._moved.clear()
        may_drop = (call.mb_spec or self.config.mb_spec).overlong == "drop"
        returned = self._restored(mbs, [result.outputs for result in results]) if call.returns else {}
        return step_output(sums, weights, divisors, call.loss_weight, returned, n_mbs=len(mbs), may_drop=may_drop)

    # ---- step 1: micro-batches

    def microbatches(self, batch: BatchInput, *, mb_spec: MicroBatchSpec | None = None) -> MicroBatchList:
        return self._prepare(batch, ("logprobs",), mb_spec)

    @property
    def batch_rules(self) -> BatchRules:
        """Rules for the batches of this engine, which a driver in another process can check, too."""
        config, components = self.config, self._require_components()
        return BatchRules(
            config.mb_spec,
            components.align,
            components.vocab_size,
            config.value_head,
            components.routing.rules,
            components.adapters is not None,
            components.media_tokens,
            components.streams,
            components.may_share and not self.supported_options.isdisjoint(("mb_spec", "mb_spec.share_prefixes")),
            components.images,
        )

    def _prepare(
        self,
        batch: BatchInput,
        outputs: Outputs,
        mb_spec: MicroBatchSpec | None = None,
        *,
        kind: Kind | None = None,
        returns: Outputs = (),
        with_loss: bool = False,
    ) -> MicroBatchList:
        components, rules = self._require_components(), self.batch_rules.cutting_by(mb_spec)
        adapters = () if components.adapters is None else components.adapters.names
        plan_here = functools.partial(rules.plan, batch, outputs, adapters=adapters)
        must_differ = with_loss and rules.spec.equal_batches == "error"
        claim_of = None if self._memory_limit is None else functools.partial(self._memory_limit.claim, kind)
        agreed = self._sync.plan(plan_here, components.schedule, claim_of, (kind, returns), must_differ=must_differ)
        self._context.check(agreed.longest, components.max_positions, components.fixed_positions, not self.control.rank)
        # A pipeline sends hidden states of one shape.
        padded_length = agreed.padded_length if components.schedule.equal_lengths else None
        # Index tensors that the model needs are copied to the device together with the batch.
        layout = functools.partial(StreamLayout.of, cp=components.context_parallel, rows=components.rows)
        with self._ending_on_error():
            return agreed.plan.build(
                n_mbs=agreed.n_mbs, device=self.device, padded_length=padded_length, layout=layout, adapters=adapters
            )

    def _measuring(self, kind: Kind, mbs: MicroBatchList) -> contextlib.AbstractContextManager[None]:
        if self._memory_limit is None:
            return contextlib.nullcontext()
        return self._memory_limit.measuring(kind, max(mb.padded_length for mb in mbs))

    # ---- step 2: weights

    def global_weight(
        self, mbs: MicroBatchList, loss_weight_fn: LossWeightFn = default_loss_weight
    ) -> Tensor | dict[str, Tensor]:
        weights = self._sync.weights(mbs, loss_weight_fn, required=True)
        totals = {name: torch.tensor(total, dtype=torch.float64) for name, total in weights.total.items()}
        return next(iter(totals.values())) if weights.plain else totals

    def global_sum(self, x: Tensor) -> Tensor:
        total = x.detach().clone().to(self.device)
        with self._ending_on_error():
            dist.all_reduce(total, group=self.dp_group)
        return total.to(x.device)

    # ---- step 3: the verb under all the others

    def forward_backward_batch(
        self,
        mbs: MicroBatchList,
        process_output: ProcessOutputFn,
        *,
        outputs: Outputs = ("logprobs",),
        forward_only: bool = False,
    ) -> list[Any]:
        components = self._require_components()
        self.batch_rules.check_outputs(outputs)
        if mbs.adapters is not None:
            self.adapters.require(mbs.adapters)
        gradients = None if forward_only else call_gradients(components, mbs.adapters)
        self._onload_for_step(grads=not forward_only)
        if gradients is not None:
            gradients.begin()

        # Run the model. An error of the model may be on this rank alone, while its peers wait in a collective, or go on without it.
        # FSDP may create parameters in its first call: never in the caller's inference mode.
        faults = Faults()
        results: dict[int, Any] = {}
        with faults.of_the_model(), self._measuring((forward_only, *outputs), mbs), torch.inference_mode(False):
            results = self._run_schedule(mbs, process_output, outputs, forward_only, faults)
        if faults.broken:
            self._end_or_reset(faults)

        # Raise the faults of all ranks on every rank, before any collective that only healthy ranks would enter.
        packed = pack_results(results, self._stages, faults) if self.dims.pp > 1 else None
        self._settle(faults, gradients)
        if self.dims.pp > 1:
            with self._ending_on_error():
                results = broadcast_results(packed, self._stages, self.control, self.device)
        if gradients is not None:
            gradients.added()
        return [results[mb.index] for mb in mbs.real]

    def _run_schedule(
        self, mbs: MicroBatchList, process_output: ProcessOutputFn, outputs: Outputs, forward_only: bool, faults: Faults
    ) -> dict[int, Any]:
        """Run the schedule on the two functions of a micro-batch, forward and process. Returns results by ``mb.index``."""
        components, timer = self._require_components(), self.timer
        scale = components.schedule.grad_scale(len(mbs))

        def forward(model: Any, mb: MicroBatch, hidden: Tensor | None = None) -> Any:
            faults.current_mb = mb
            return self._forward_compute_mb(model, mb, outputs=outputs, hidden=hidden)

        def process(local: TokenOutputs, mb: MicroBatch) -> tuple[Tensor | None, Any]:
            shared = layout_of(mb, components.context_parallel, rows=components.rows).shared
            output_index = None if shared is None else shared.outputs.output_index
            tokens = gather_outputs(local, components.context_parallel, mb.n_tokens, output_index)
            loss, result = None, None
            # A fault must not leave the other ranks in a collective: stay in step, add nothing, and raise at the end.
            if not mb.filler and faults.first is None:
                with faults.deferred(), refusing_backward(tokens):
                    returned, result = process_output(tokens, mb)
                    loss = None if forward_only else reach_all_heads(check_loss(returned, mb), tokens)
            if forward_only:
                return None, result
            return (zero_gradient_loss(tokens) if loss is None else loss * scale), result

        functions = timer.timed("forward", forward), timer.timed("forward", process)
        # The remaining time of the schedule counts as backward, or as forward if there is no backward.
        remaining = "forward" if forward_only else "backward"
        with torch.set_grad_enabled(not forward_only), timer.phase(remaining, label="schedule"):
            return components.schedule.run(mbs, *functions, forward_only=forward_only)

    # ---- faults of step 3

    def _end_or_reset(self, faults: Faults) -> None:
        """End the engine on all ranks after an error of the model, which leaves them out of step.

        On a single rank the model is reset instead, if that is possible.
        """
        error = faults.first or RuntimeError("the model failed")
        if self.dims.world_size == 1 and not faults.final and self._reset_model():
            return
        lost = self.control.fail(error, final=faults.final)
        self._teardown_after_fault()
        raise faults.interrupt or lost from error

    def _reset_model(self) -> bool:
        """Reset the model after a failed micro-batch. Returns False if that is impossible."""
        try:
            reset = self._require_components().schedule.recover()
            platform.empty_cache(self.device)
        except Exception:
            logger.exception("the model cannot be reset after an error")
            return False
        return reset

    def _settle(self, faults: Faults, gradients: CallGradients | None) -> None:
        """Raise on every rank when any rank has an error. The gradients of the call are undone then."""
        with self._undoing(gradients):
            if faults.interrupt is not None:
                raise faults.interrupt
            self.control.settle(faults.first, "" if gradients is None else gradients.on_error)

    @contextlib.contextmanager
    def _undoing(self, gradients: CallGradients | None) -> Iterator[None]:
        """Undo incomplete gradients after an error inside, and release everything if the error has ended the engine."""
        try:
            yield
        except EngineLostError:
            self._teardown_after_fault()
            raise
        except BaseException:
            if gradients is not None:
                gradients.undo()
            raise

    # ---- optimizer

    def optimizer_step(self, settings: StepSettings | None = None) -> OptimStats:
        stats = self._apply_gradients(settings)
        self.control.gather(None)  # return only if all ranks have taken the step
        return stats

    def _apply_gradients(self, settings: StepSettings | None = None) -> OptimStats:
        optimizer = self._require_optimizer()
        components = self._reduced_components()
        with self._ending_on_error(), self.timer.phase("optimizer"), torch.inference_mode(False):
            components.memory.onload(params=True, grads=True, optimizer=True)
            stats = optimizer.step(settings)
            self.zero_grad()
        return stats

    def _reduced_components(self) -> EngineComponents:
        components = self._require_components()
        state = components.gradients.state
        if not state.accumulated:
            raise RuntimeError("no gradient is pending: call forward_backward() first")
        if not state.reduced:
            with self._ending_on_error(), self.timer.phase("reduce"):
                components.memory.onload(params=False, grads=True, optimizer=False)
                # The gradients of adapters are reduced alike on all engines.
                if components.adapters is None:
                    self._finalize_grads()
                else:
                    components.adapters.sum_gradients()
            state.set(accumulated=True, reduced=True)
        return components

    def zero_grad(self) -> None:
        gradients = self._require_components().gradients
        gradients.zero()
        gradients.state.set(accumulated=False)
