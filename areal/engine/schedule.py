"""Who owns the micro-batch loop.

A schedule is only a caller of two pure halves: ``forward``, on every stage, and ``process``, on the last one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from areal.api.batch import TokenOutputs
from areal.api.microbatch import MicroBatch, MicroBatchList
from areal.utils.profiling.phase_timer import PhaseTimer

ForwardFn = Callable[..., Any]
"""``forward(model, mb, hidden=None)``: a hidden state off the last stage, this rank's :class:`TokenOutputs` on it."""

ProcessFn = Callable[[TokenOutputs, MicroBatch], tuple[Tensor | None, Any]]
"""``(loss to call backward on, or None when forward only; result)``."""


class Schedule(Protocol):
    """The only owner of a micro-batch loop.

    Attributes:
        equal_lengths: all micro-batches of a step are padded to one length.
    """

    equal_lengths: bool

    def round_up(self, n: int) -> int:
        """The least number of micro-batches, at least ``n``, that this schedule can run."""
        ...

    def grad_scale(self, n: int) -> float:
        """The inverse of what this schedule's own machinery divides the gradient of ``n`` micro-batches by."""
        ...

    def run(self, mbs: MicroBatchList, forward: ForwardFn, process: ProcessFn, *, forward_only: bool) -> dict[int, Any]:
        """Run every micro-batch once. Results by ``mb.index``; ``{}`` off the last stage."""
        ...


class SequentialSchedule:
    """One micro-batch after the other, on one stage.

    Args:
        model: passed to ``forward``.
        before_backward: called with True when the next backward is the last of the call, else False: where an engine
            decides whether that backward reduces gradients.
        rest: called after a run without backward, where an engine frees what only a backward would have freed.
        timer: the engine's, so that a profile names the micro-batch of each backward.
    """

    equal_lengths = False

    def __init__(
        self,
        model: nn.Module,
        before_backward: Callable[[bool], None],
        rest: Callable[[], None] = lambda: None,
        timer: PhaseTimer | None = None,
    ) -> None:
        self._model = model
        self._before_backward = before_backward
        self._rest = rest
        self._timer = timer or PhaseTimer(torch.device("cpu"))

    def round_up(self, n: int) -> int:
        return n

    def grad_scale(self, n: int) -> float:
        return 1.0

    def run(self, mbs: MicroBatchList, forward: ForwardFn, process: ProcessFn, *, forward_only: bool) -> dict[int, Any]:
        results: dict[int, Any] = {}
        for position, mb in enumerate(mbs):
            if not forward_only:
                self._before_backward(position == len(mbs) - 1)
            loss, results[mb.index] = process(forward(self._model, mb), mb)
            if loss is not None:
                with self._timer.phase("backward", mb.index):
                    loss.backward()
        if forward_only:
            self._rest()
        return results
