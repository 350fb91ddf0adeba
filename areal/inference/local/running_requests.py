"""Requests of a rollout that are not answered yet."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from transformers.generation import ContinuousBatchingManager
from transformers.generation.continuous_batching.requests import FutureRequestState, GenerationOutput, RequestStatus

from areal.inference.local.prompt_images import PromptImages
from areal.inference.local.request_name import RequestName
from areal.inference.local.sampler import Request, RequestSampler
from areal.inference.local.served_adapters import ServedAdapter, ServedAdapters
from areal.inference.local.shared_prompts import PromptKey, SharedPrompts
from areal.inference.protocol import Completion


@dataclass
class PendingAnswer:
    """A request that is not finished, and the future of its answer.

    Attributes:
        prompt: its tokens.
        request: the state of its answer.
        adapter: ``None`` for the model itself.
        images: ``None`` for a prompt without images.
        key: key of the prompt. Requests with the same key share its keys and values.
    """

    prompt: tuple[int, ...]
    request: Request
    adapter: ServedAdapter | None = None
    images: PromptImages | None = None
    future: Future[Completion] = field(default_factory=Future)

    @cached_property
    def key(self) -> PromptKey:
        number = 0 if self.adapter is None else self.adapter.number
        if self.images is None:
            return number, self.prompt
        return number, (*self.prompt, *self.images.words.tolist())

    def resolve(self, answer: Completion | RuntimeError) -> None:
        """Set the result of the future, unless it was cancelled."""
        if not self.future.set_running_or_notify_cancel():
            return
        if isinstance(answer, Completion):
            self.future.set_result(answer)
        else:
            self.future.set_exception(answer)


class Router(Protocol):
    """Prepares forwards for their requests."""

    def schedule(self, requests: Sequence[FutureRequestState]) -> None:
        """Prepare the next forward, given its requests in the order of their tokens."""


class RunningRequests:
    """Passes requests to a manager, and delivers their answers.

    Args:
        adapters: adapters that requests can name.
        page_size: number of tokens above which a prompt is shared.
        version: version of the weights.
        routers: prepare each forward for its requests.
        refused: see :class:`~areal.inference.local.sampler.RequestSampler`.

    Attributes:
        manager: manager that generates. Set before the first request.
        sampler: sampler of the manager.
        lock: guards the requests and the adapters.
        closed: whether the rollout is closed: requests end with their tokens so far.
    """

    manager: ContinuousBatchingManager

    def __init__(
        self,
        adapters: ServedAdapters,
        page_size: int,
        version: int,
        routers: Sequence[Router],
        refused: frozenset[int],
    ) -> None:
        self._adapters, self._page_size, self._routers = adapters, page_size, routers
        on = (self._on_first_token, self._on_stop_string, self._on_scheduled, self._on_failed)
        self.sampler = RequestSampler(version, *on, refused)
        self.lock = threading.Lock()
        self.closed = False
        self._count = 0
        self._pending: dict[str, PendingAnswer] = {}
        self._waiting = SharedPrompts()

    def __len__(self) -> int:
        return len(self._pending)

    def add(
        self, prompt: Sequence[int], images: PromptImages | None, request: Request, adapter: str | None
    ) -> tuple[str, PendingAnswer]:
        """Start a request, or let it wait for another one with the same prompt. Returns its name. Called with the lock.

        Raises:
            ValueError: there is no such adapter.
        """
        pending = PendingAnswer(tuple(prompt), request, self._adapters.begin(adapter), images)
        name = f"request {self._count}"
        self._count += 1
        self._pending[name] = pending
        self.sampler.add(name, request)
        # Shorter prompts do not fill a page, the unit of sharing.
        if len(prompt) <= self._page_size or not self._waiting.waits(pending.key, name):
            self._start(name, pending)
        return name, pending

    def cancel(self, name: str) -> PendingAnswer | None:
        """End a request at the next step, without an answer. Returns ``None`` if it has ended."""
        pending = self._remove(name)
        self.manager.cancel_request(name)
        return pending

    def finish(self, result: GenerationOutput) -> None:
        """Deliver the answer or the error of one request."""
        if result.status != RequestStatus.FINISHED:
            self._end(result.request_id, f"generation has failed: {result.error}")
            return
        pending = self._remove(result.request_id)
        if pending is not None and pending.request.tokens != result.generated_tokens:
            error = "other tokens came back than were drawn: this release of transformers is unknown"
            pending.resolve(RuntimeError(f"{result.request_id}: {error}"))
        elif pending is not None:
            pending.resolve(pending.request.completion())

    def end_all(self, why: str) -> None:
        """End all requests: with their tokens so far if the rollout is closed, else with an error."""
        for name in list(self._pending):
            self._end(name, why)

    def fail_all(self, why: str) -> None:
        """Cancel all requests, with an error."""
        for name in list(self._pending):
            pending = self.cancel(name)
            if pending is not None:
                pending.resolve(RuntimeError(why))

    def _start(self, name: str, pending: PendingAnswer) -> None:
        """Pass a request to the manager. If generation has just failed, the manager ignores it, and :meth:`end_all` ends it."""
        sampling = pending.request.sampling
        self.manager.add_request(
            list(pending.prompt),
            request_id=RequestName(name, pending.adapter, pending.images),
            max_new_tokens=sampling.max_new_tokens,
            eos_token_id=list(sampling.stop_token_ids or ()),
        )

    def _on_scheduled(self, requests: Sequence[FutureRequestState]) -> None:
        for router in self._routers:
            router.schedule(requests)

    def _on_first_token(self, name: str) -> None:
        """Start the requests that wait for the prompt of ``name``, which is in the cache now."""
        with self.lock:
            if name in self._pending:
                self._start_waiting(name, self._pending[name])

    def _on_stop_string(self, name: str) -> None:
        """Deliver an answer whose text has a stop string, of which the manager knows nothing."""
        pending = self._remove(name)
        if pending is not None:
            self.manager.cancel_request(name)
            pending.resolve(pending.request.completion("stop"))

    def _on_failed(self, name: str, why: str) -> None:
        """Fail one request. Others continue."""
        pending = self.cancel(name)
        if pending is not None:
            pending.resolve(RuntimeError(why))

    def _start_waiting(self, name: str, pending: PendingAnswer) -> None:
        """Start the requests that wait for ``name`` to compute its prompt. Called with the lock."""
        for other in self._waiting.computed(pending.key, name):
            if other in self._pending and not self.closed:
                self._start(other, self._pending[other])

    def _remove(self, name: str) -> PendingAnswer | None:
        """Remove a request, and let others with its prompt go on. Returns ``None`` if it was removed before."""
        with self.lock:
            self.sampler.remove(name)
            pending = self._pending.pop(name, None)
            if pending is not None:
                self._start_waiting(name, pending)
                self._adapters.end(pending.adapter)
            return pending

    def _end(self, name: str, why: str) -> None:
        """End a request early: with its tokens so far if the rollout is closed, else with an error."""
        pending = self._remove(name)
        if pending is not None and self.closed:
            pending.resolve(pending.request.completion("aborted"))
        elif pending is not None:
            pending.resolve(RuntimeError(why))
