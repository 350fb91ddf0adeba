"""Order of training requests: by ``seq_id`` within a model, fair between models."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Any

from areal.tinker.service.model import TrainedModel
from areal.tinker.service.verbs.verb import TrainingRequest

logger = logging.getLogger(__name__)

MAX_LOSS_POINTS = 500
"""Most points of the loss curve of a model on the status page."""


@dataclass(eq=False)
class Entry:
    """A stored request in the order of its model.

    Attributes:
        prepared: its validated content.
        attempts: losses of the backend, or ends of the server, that have interrupted it.
    """

    request_id: str
    request: TrainingRequest
    seq: int = 0
    prepared: Any = None
    refused: bool = False
    attempts: int = 0

    @property
    def kind(self) -> str:
        """Kind of the request."""
        return self.request.kind

    def log_failure(self, message: str) -> None:
        """Log that the request was refused or has failed, for the operator."""
        logger.info("%s %s has failed: %.300s", self.kind, self.request_id, message)


@dataclass(eq=False)
class LiveModel(TrainedModel):
    """A model of this process, with the requests that wait for it.

    Attributes:
        next_seq: number of the next request that may run. The creation has the number 0.
        top_seq: highest number that any request has.
        failed: numbers of requests that failed before their turn.
        losses: ``(seq_id, loss, tokens)`` of the last passes.
        asleep: its adapter is not in the backend, and must be restored before its next request.
        attempts: losses of the backend in its restoration while no request waited for it.
        stored_uid, stored_at: folder and time of its last snapshot; the time of its creation if it has none.
        steps: optimizer steps since then.
    """

    next_seq: int = 0
    top_seq: int = 0
    arriving: int = 0
    busy: bool = False
    waiting: dict[int, Entry] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    losses: deque[tuple[int, float, int]] = field(default_factory=lambda: deque(maxlen=MAX_LOSS_POINTS))
    gap_timer: Any = None
    running: tuple[str, ...] = ()
    asleep: bool = False
    attempts: int = 0
    stored_uid: str | None = None
    stored_at: float = field(default_factory=time.monotonic)
    steps: int = 0

    def number(self, seq_id: int | None) -> int:
        """Return the number of an arriving request: its own, or the next one for old clients."""
        seq = self.top_seq + 1 if seq_id is None else seq_id
        self.top_seq = max(self.top_seq, seq)
        return seq

    def put(self, entry: Entry) -> None:
        """Add a stored request. One that was refused has used its number."""
        if entry.refused:
            self.failed.add(entry.seq)
        else:
            self.waiting[entry.seq] = entry
        self._skip_failed()

    def put_back(self, entry: Entry) -> None:
        """Let a request run again that the loss of the backend has interrupted. Numbers after it that have failed are used."""
        self.failed.update(range(entry.seq + 1, self.next_seq))
        self.next_seq, self.waiting[entry.seq], self.busy = entry.seq, entry, False

    def pass_over(self) -> list[Entry]:
        """Remove all waiting requests, which fail, and return them. Their numbers are used."""
        entries = list(self.waiting.values())
        self.failed.update(self.waiting)
        self.waiting.clear()
        return entries

    def _skip_failed(self) -> None:
        while self.next_seq in self.failed:
            self.failed.remove(self.next_seq)
            self.next_seq += 1

    def head(self) -> Entry | None:
        """Return the request that may run now, or once the model is restored. A gap in the numbers waits."""
        return None if self.busy or self.closed else self.waiting.get(self.next_seq)

    def take(self) -> Entry:
        """Remove the request that runs now. The next one runs after :meth:`release`."""
        entry = self.waiting.pop(self.next_seq)
        self.next_seq += 1
        self.busy = True
        return entry

    def release(self) -> None:
        """Let the next request run."""
        self.busy = False
        self._skip_failed()

    def has_gap(self) -> bool:
        """Return whether requests wait for one with a lower number, which is missing."""
        return bool(self.waiting) and self.next_seq not in self.waiting and not self.busy

    def cancel_gap(self) -> None:
        """Stop waiting for a missing request."""
        if self.gap_timer is not None:
            self.gap_timer.cancel()
            self.gap_timer = None

    def queued(self) -> int:
        """Return the number of requests that arrived and did not start."""
        return len(self.waiting) + self.arriving

    def describe(self) -> dict[str, Any]:
        """Return the state of the model as a JSON value."""
        return {
            "model_id": self.id,
            "session_id": self.session_id,
            "owner": self.owner,
            "rank": self.spec.rank if self.spec else None,
            "created": self.created,
            "last_request": self.last_request,
            "queued": self.queued(),
            "seq_id": self.next_seq - 1,
        }


class Order:
    """Live models in the order of their turns."""

    def __init__(self) -> None:
        self.models: OrderedDict[str, LiveModel] = OrderedDict()

    def queued(self) -> int:
        """Return the number of requests that wait."""
        return sum(model.queued() for model in self.models.values())

    def next_asleep(self) -> LiveModel | None:
        """Return a model with a ready request that must be restored first."""
        return next((model for model in self.models.values() if model.asleep and model.head()), None)

    def next_group(self, most: int) -> list[tuple[LiveModel, Entry]]:
        """Take the requests of the next call of the backend, one for each model.

        The model whose turn was longest ago comes first. Ready requests of the same verb of other models join it if the verb is batched, up
        to ``most``.
        """
        heads = [(model, entry) for model in self.models.values() if (entry := model.head()) and not model.asleep]
        if not heads:
            return []
        # Models with a ready request of this verb, in the order of their turns. One that was interrupted runs alone: it may be the cause.
        first, verb = heads[0][1], type(heads[0][1].request)
        ready = [model for model, entry in heads if type(entry.request) is verb and entry.attempts == first.attempts]
        chosen = ready[: most if verb.batched and not first.attempts else 1]
        # Each of them has had its turn.
        for model in chosen:
            self.models.move_to_end(model.id)
        return [(model, model.take()) for model in chosen]
