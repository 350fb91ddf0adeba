"""The owner of the micro-batch loop.

A schedule calls two pure functions for each micro-batch: ``forward`` on every pipeline stage, and ``process`` on the last stage.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from areal.api.batch import TokenOutputs
from areal.api.microbatch import MicroBatch, MicroBatchList
from areal.utils.profiling.phase_timer import PhaseTimer

ForwardFn = Callable[..., Any]
"""``forward(model, mb, hidden=None)``: :class:`TokenOutputs` of this rank on the last stage, a hidden state on the others."""

ProcessFn = Callable[[TokenOutputs, MicroBatch], tuple[Tensor | None, Any]]
"""``process(outputs, mb)``: the loss to call backward on, or ``None``, and a result."""


class Schedule(Protocol):
    """The only owner of a micro-batch loop. A subclass inherits the methods that it does not need.

    Attributes:
        equal_lengths: pad all micro-batches of a step to one length.
    """

    equal_lengths: bool

    def round_up(self, n: int) -> int:
        """Return the least number of micro-batches, at least ``n``, that this schedule can run."""
        ...

    def grad_scale(self, n: int) -> float:
        """Return the inverse of the factor by which this schedule's own machinery divides the gradient of ``n`` micro-batches."""
        ...

    def run(self, mbs: MicroBatchList, forward: ForwardFn, process: ProcessFn, *, forward_only: bool) -> dict[int, Any]:
        """Run every micro-batch once.

        Returns:
            Results by ``mb.index``; ``{}`` on all stages but the last.
        """
        ...

    def last_call(self) -> contextlib.AbstractContextManager[None]:
        """Announce that the optimizer step follows the call inside, so that reductions may overlap with its last backward."""
        return contextlib.nullcontext()

    def recover(self) -> bool:
        """Reset the model after a failed micro-batch. Returns False if that is impossible."""
        return True

    def close(self) -> None:
        """Release the model and the process groups. A schedule is not used afterwards."""


class SequentialSchedule(Schedule):
    """One micro-batch after the other, on one stage.

    Args:
        model: what is passed to ``forward``.
        before_backward: called before each backward with True if it is the last of the call. An engine decides here whether that backward
            reduces gradients.
        after_forward: called after a run without backward, to free what only a backward would have freed.
        recover: see :meth:`Schedule.recover`.
        timer: the engine's, so that a profile names the micro-batch of each backward.
        after_run: called at the end of every run, also after an error.
    """

    equal_lengths = False

    def __init__(
        self,
        model: Any,
        before_backward: Callable[[bool], None] = lambda last: None,
        after_forward: Callable[[], None] = lambda: None,
        recover: Callable[[], bool] = lambda: True,
        timer: PhaseTimer | None = None,
        after_run: Callable[[], None] = lambda: None,
    ) -> None:
        self._model = model
        self._before_backward = before_backward
        self._after_forward = after_forward
        self._recover = recover
        self._after_run = after_run
        self._timer = timer or PhaseTimer(torch.device("cpu"))

    def round_up(self, n: int) -> int:
        return n

    def grad_scale(self, n: int) -> float:
        return 1.0

    def run(self, mbs: MicroBatchList, forward: ForwardFn, process: ProcessFn, *, forward_only: bool) -> dict[int, Any]:
        results: dict[int, Any] = {}
        try:
            for position, mb in enumerate(mbs):
                if not forward_only:
                    self._before_backward(position == len(mbs) - 1)
                loss, results[mb.index] = process(forward(self._model, mb), mb)
                # Without a loss, the process function only reads outputs.
                if loss is not None:
                    with self._timer.phase("backward", mb.index):
                        loss.backward()
        finally:
            self._after_run()
        if forward_only:
            self._after_forward()
        return results

    def recover(self) -> bool:
        return self._recover()

    def close(self) -> None:
        # The callables are closures over the model.
        del self._model, self._before_backward, self._after_forward, self._recover, self._after_run
