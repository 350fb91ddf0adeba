"""The schedules of ``torch.distributed.pipelining`` behind ours: one of them owns the loop, and calls our two halves of a micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

from areal.api.microbatch import MicroBatch, MicroBatchList
from areal.engine.fsdp import gradients as grad
from areal.engine.fsdp.pipeline.model_chunks import ModelChunks
from areal.engine.fsdp.pipeline.schedule_specs import ScheduleSpec
from areal.engine.schedule import ForwardFn, ProcessFn
from areal.utils.dtensor import reshard
from areal.utils.profiling.phase_timer import PhaseTimer


class PipelineSchedule:
    """Runs micro-batches through the stages of a pipeline.

    All stages of a data-parallel coordinate have the same micro-batches, so that only hidden states and their gradients travel. Torch holds the
    reductions of a stage, which is an FSDP module, back to the end of a call.

    Args:
        chunks: of this rank, each sharded. spec: which schedule.
        dtype: of hidden states. token_split: ranks that share the tokens of a micro-batch.
        timer: the engine's, so that a profile names the micro-batch of each backward.
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
    ) -> None:
        self._chunks, self._spec, self._timer = chunks, spec, timer
        self._device, self._dtype, self._token_split = device, dtype, token_split
        self._width = chunks.full_model.hf.config.get_text_config().hidden_size

    def round_up(self, n: int) -> int:
        return self._spec.round_up(n, len(set(self._chunks.split.ranks)))

    def grad_scale(self, n: int) -> float:
        """Torch is told to divide nothing."""
        return 1.0

    def run(self, mbs: MicroBatchList, forward: ForwardFn, process: ProcessFn, *, forward_only: bool) -> dict[int, Any]:
        results: dict[int, Any] = {}

        def compute(chunk: Any, mb: MicroBatch, hidden: Tensor | None) -> Tensor:
            out = forward(chunk, mb, hidden)
            if isinstance(out, Tensor):
                return out
            loss, results[mb.index] = process(out, mb)
            return torch.zeros((), device=self._device) if loss is None else loss

        schedule = self._schedule(mbs, compute)
        # Which micro-batch it is, each stage looks up itself.
        step = schedule.eval if forward_only else schedule.step
        try:
            step(target=torch.zeros(len(mbs)), return_outputs=False)
        except RuntimeError as error:  # Torch wraps what a stage met in a text with all its arguments.
            raise error.__cause__ if isinstance(error.__cause__, Exception) else error from None
        finally:
            if forward_only:
                reshard(self._chunks)
        return results

    def _schedule(self, mbs: MicroBatchList, compute: Callable[[Any, MicroBatch, Tensor | None], Tensor]) -> Any:
        """Made anew for each call: its buffers are as long as the micro-batches, and it may be asked to run another number of them."""
        split, tokens = self._chunks.split, mbs[0].padded_length // self._token_split
        hidden = torch.empty(1, tokens, self._width, dtype=self._dtype, device="meta", requires_grad=True)
        stages = [
            _Stage(
                chunk,
                number,
                len(split.spans),
                self._device,
                # Given these, torch need not run the model to find them out.
                input_args=hidden if number else (),
                output_args=hidden,
                group=self._chunks.group,
            )
            for number, chunk in zip(self._chunks.stages, self._chunks, strict=True)
        ]
        for stage in stages:
            stage.compute, stage.mbs, stage.timer = compute, mbs, self._timer
        return self._spec.torch_class(
            stages[0] if self._spec.chunks == "one" else stages, len(mbs), loss_fn=_loss, scale_grads=False
        )


def _loss(output: Tensor, target: Tensor) -> Tensor:
    """What the last stage returns is the loss already."""
    return output


class _Stage(PipelineStage):
    """A stage that knows which micro-batch it is at."""

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
        if not self.has_backward:
            return
        with self.timer.phase("backward", self.mbs[bwd_chunk_id].index):
            super().backward_one_chunk(bwd_chunk_id, *args, **options)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        with self.timer.phase("backward", self.mbs[bwd_chunk_id].index):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward=last_backward)
        # No hook of FSDP runs in this half of a backward: sums over micro-batches are to be in the dtype of the reduction.
        for module in self.submod.modules():
            if isinstance(module, FSDPModule):
                grad.accumulate(module)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        if self.has_backward:
            super().perform_reduce_grad(grad_scale_factor)

    def _post_metadata_inference_cleanup(self) -> None:
        """Nothing was tried out. Torch would drop the gradients of earlier calls here."""

    def _validate_fwd_outputs(self, outputs: Any) -> None:
        """Of torch before 2.13, which expects hidden states of the last stage too."""

    # In a forward alone, a stage has nothing to hand to the one before it on the same rank.

    def get_local_bwd_output(self, mb_index: int) -> Any:
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)
