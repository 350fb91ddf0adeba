"""Answers that are not finished."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

from areal.trainer.rollout.protocol import Completion
from areal.trainer.rollout.sampler import Request


@dataclass
class PendingAnswer:
    """A request that is not finished, and the future of its answer."""

    prompt: tuple[int, ...]
    request: Request
    future: Future[Completion] = field(default_factory=Future)

    def resolve(self, answer: Completion | RuntimeError) -> None:
        """Set the result of the future, unless it was cancelled."""
        if not self.future.set_running_or_notify_cancel():
            return
        if isinstance(answer, Completion):
            self.future.set_result(answer)
        else:
            self.future.set_exception(answer)
