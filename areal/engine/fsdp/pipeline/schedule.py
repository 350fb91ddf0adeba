"""Adapter from ``torch.distributed.pipelining`` to the engine's schedules: torch owns the loop and calls forward and
loss of each micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

from areal.api.microbatch import MicroBatch, MicroBatchList
from areal.engine.fsdp import gradients as grad
from areal.engine.fsdp.pipeline.schedule_specs import ScheduleSpec
from areal.engine.schedule import ForwardFn, ProcessFn, Schedule
from areal.engine.torch.model_chunks import ModelChunks
from areal.utils.dtensor import reshard
from areal.utils.profiling.phase_timer import PhaseTimer


class PipelineSchedule(Schedule):
    """Runs micro-batches through the stages of a pipeline.

    All stages of a data-parallel coordinate have the same micro-batches, so that only hidden states and their
    gradients are sent. Each stage is an FSDP module, and torch defers its reductions to the end of a call.

    Args:
        chunks: stages of this rank, each sharded.
        spec: schedule to run.
        device: device of the engine.
        dtype: dtype of hidden states.
        token_split: number of ranks that divide the tokens of a micro-batch.
        timer: the engine's timer; a profile then names the micro-batch of each backward.
        after_run: called at the end of every run, also after an error.
    """

    equal_lengths = True

    def __init__(
        self,
        chunks: ModelChunks,
        spec: ScheduleSpec,
        device: torch.device,
        dtype: torch.dtype,
        token_split: int,
        timer: PhaseTimer,
        after_run: Callable[[], None] = lambda: None,
    ) -> None:
        self._chunks, self._spec, self._timer, self._after_run = chunks, spec, timer, after_run
        self._device, self._dtype, self._token_split = device, dtype, token_split
        self._width = chunks.full_model.hf.config.get_text_config().hidden_size

    def round_up(self, n: int) -> int:
        return self._spec.round_up(n, len(set(self._chunks.split.ranks)))

    def grad_scale(self, n: int) -> float:
        """Return 1: torch is configured to divide nothing."""
        return 1.0

    def run(self, mbs: MicroBatchList, forward: ForwardFn, process: ProcessFn, *, forward_only: bool) -> dict[int, Any]:
        results: dict[int, Any] = {}

        # Called by torch for each stage and micro-batch; only the last stage returns a loss.
        def compute(chunk: Any, mb: MicroBatch, hidden: Tensor | None) -> Tensor:
            out = forward(chunk, mb, hidden)
            if isinstance(out, Tensor):
                return out
            loss, results[mb.index] = process(out, mb)
            return torch.zeros((), device=self._device) if loss is None else loss

        schedule = self._schedule(mbs, compute)
        # The argument only fixes the number of micro-batches: each stage looks up its own.
        step = schedule.eval if forward_only else schedule.step
        try:
            step(target=torch.zeros(len(mbs)), return_outputs=False)
        except RuntimeError as error:  # torch wraps the original error in a long text
            raise error.__cause__ if isinstance(error.__cause__, Exception) else error from None
        finally:
            self._after_run()
            # Without a backward, FSDP leaves the last weights gathered.
            if forward_only:
                reshard(self._chunks)
        return results

    def close(self) -> None:
        del self._chunks, self._after_run

    def _schedule(self, mbs: MicroBatchList, compute: Callable[[Any, MicroBatch, Tensor | None], Tensor]) -> Any:
        """Create a torch schedule for one call: its buffers depend on the length and the number of micro-batches."""
        split, tokens = self._chunks.split, mbs[0].padded_length // self._token_split
        # Hidden states of one micro-batch, as sent between stages: [1, tokens, hidden size].
        hidden = torch.empty(1, tokens, self._width, dtype=self._dtype, device="meta", requires_grad=True)
        stages = [
            _Stage(
                chunk,
                number,
                len(split.spans),
                self._device,
                # With these, torch does not run the model to infer shapes.
                input_args=hidden if number else (),
                output_args=hidden,
                group=self._chunks.group,
            )
            for number, chunk in zip(self._chunks.stages, self._chunks, strict=True)
        ]
        for stage in stages:
            stage.compute, stage.mbs, stage.timer = compute, mbs, self._timer
        return self._spec.torch_class(
            stages[0] if self._spec.chunks == "one" else stages, len(mbs), loss_fn=_output_as_loss, scale_grads=False
        )


def _output_as_loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the output of the last stage, which already is the loss."""
    return output


class _Stage(PipelineStage):
    """A torch stage that knows its current micro-batch."""

    compute: Callable[[Any, MicroBatch, Tensor | None], Tensor]
    mbs: MicroBatchList
    timer: PhaseTimer
    _current_mb: MicroBatch

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        self._current_mb = self.mbs[fwd_chunk_id]
        return super().forward_one_chunk(fwd_chunk_id, *args, **options)

    def forward_maybe_with_nosync(self, hidden: Tensor | None = None) -> Tensor:
        return self.compute(self.submod, self._current_mb, hidden)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **options: Any) -> None:
        # A forward-only call runs no backward.
        if not self.has_backward:
            return
        with self.timer.phase("backward", self.mbs[bwd_chunk_id].index):
            super().backward_one_chunk(bwd_chunk_id, *args, **options)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        with self.timer.phase("backward", self.mbs[bwd_chunk_id].index):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward=last_backward)
        # No FSDP hook runs in this phase of a backward: accumulate in the dtype of the reduction here.
        for module in self.submod.modules():
            if isinstance(module, FSDPModule):
                grad.accumulate(module)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        if self.has_backward:
            super().perform_reduce_grad(grad_scale_factor)

    def _post_metadata_inference_cleanup(self) -> None:
        """Do nothing: torch would discard the gradients of earlier calls here, but no shape inference took place."""

    def _validate_fwd_outputs(self, outputs: tuple[Tensor, ...]) -> None:
        """Do nothing: torch 2.11 would compare the loss of the last stage with hidden states."""

    # In a forward-only call, a stage does not have a gradient for the previous stage on the same rank.

    def get_local_bwd_output(self, mb_index: int) -> Any:
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)
