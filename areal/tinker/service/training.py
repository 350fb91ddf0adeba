"""Execution of training requests: one task takes them in order, one thread runs the backend."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from sqlalchemy import Connection, update

from areal.tinker.backends.backend import TrainingBackend
from areal.tinker.backends.errors import BackendLostError, ServerError, UserError
from areal.tinker.service.backend_thread import BackendThread
from areal.tinker.service.checkpoints import CheckpointRegistry, lost_message
from areal.tinker.service.order import Entry, LiveModel, Order
from areal.tinker.service.sampling import Samplers
from areal.tinker.service.settings import ServiceSettings
from areal.tinker.service.store.database import Database
from areal.tinker.service.store.futures import Category, Futures
from areal.tinker.service.store.tables import models
from areal.tinker.service.verbs.models import CreateModel
from areal.tinker.service.verbs.verb import RequestTurn

_T = TypeVar("_T")

MAX_MODELS_PER_CALL = 64
"""Most requests, each of another model, that are given to a backend in one call. The backend divides them into passes."""

logger = logging.getLogger(__name__)


class Training:
    """Live models and their requests.

    The dispatcher task waits for arrivals and for the end of requests; nothing polls. While the backend runs a request, results of earlier
    ones are stored.
    """

    def __init__(
        self,
        backend: TrainingBackend,
        database: Database,
        futures: Futures,
        registry: CheckpointRegistry,
        samplers: Samplers,
        settings: ServiceSettings,
    ) -> None:
        self._backend = backend
        self._thread = BackendThread(backend)
        self._database = database
        self._futures = futures
        self._registry = registry
        self._samplers = samplers
        self._settings = settings
        self.order = Order()
        self.counts: Counter[tuple[str, str]] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._doomed: deque[LiveModel] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._dispatcher: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the dispatcher."""
        self._dispatcher = asyncio.get_running_loop().create_task(self._dispatch())

    async def stop(self) -> None:
        """Stop the dispatcher, and wait for the call of the backend that runs."""
        tasks = [*self._tasks, *([self._dispatcher] if self._dispatcher else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._thread.stop()

    @property
    def backend_error(self) -> str | None:
        """Why the backend does not run, if it could not be restarted."""
        return self._thread.error

    def halt(self) -> None:
        """Run no further request."""
        if self._dispatcher is not None:
            self._dispatcher.cancel()

    # ------------------------------------------------------------------ arrival

    def add_model(self, model: LiveModel) -> None:
        """Add a model whose creation is its first request."""
        self.order.models[model.id] = model

    def put(self, model: LiveModel, entry: Entry) -> None:
        """Add a stored and prepared request, and look whether it can run."""
        model.put(entry)
        self._watch_gap(model)
        self._wake.set()

    async def close_model(self, model: LiveModel, state: str, reason: str, category: Category) -> None:
        """End a model: its requests fail, and its adapter is released."""
        if model.closed is not None:
            return
        model.closed, model.blame = reason, category
        logger.info("%s has ended (%s): %s", model.id, state, reason)
        self.order.models.pop(model.id, None)
        self._cancel_gap(model)
        failed = [*(entry.request_id for entry in model.waiting.values()), *model.running]
        model.waiting.clear()
        self._doomed.append(model)
        self._wake.set()
        # First the state of the model, which clients may read after a failure. The running request fails, too, before the backend ends it.
        try:
            await self.store_state(model, state)
        finally:
            await self._futures.fail(failed, reason, category)

    # ------------------------------------------------------------------ dispatch

    async def _dispatch(self) -> None:
        """Run what can run, then wait for a change."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while await self._run_next():
                pass

    async def _run_next(self) -> bool:
        """Release an adapter, or run the requests of one call. Returns False if nothing is ready."""
        # One call of the backend at a time; what follows a call does not hold back other models.
        await self._idle.wait()
        if self._doomed:
            await self._release_adapter(self._doomed.popleft())
            return True
        batched = self._backend.batches_models()
        group = self.order.next_group(MAX_MODELS_PER_CALL if batched else 1)
        if not group:
            return False
        for model, entry in group:
            model.running = (entry.request_id,)
        self._idle.clear()
        self._spawn(self._run_group(group))
        return True

    async def _run_group(self, group: list[tuple[LiveModel, Entry]]) -> None:
        """Run the requests of one turn."""
        started = time.monotonic()
        try:
            if group[0][1].request.batched:
                await self._run_batch(group)
            else:
                await self._run_one(*group[0])
        except BackendLostError as error:
            await self._lose_models(str(error))
        except Exception:
            # A defect in the handling of one request must not leave it without an answer.
            logger.exception("a training request could not be handled")
            message = "the server could not handle the request; its log says why"
            await self._futures.fail([entry.request_id for _, entry in group], message, "server")
        finally:
            for model, _ in group:
                model.running = ()
            self.seconds[group[0][1].kind] += time.monotonic() - started
            self.end_turn()

    async def _run_batch(self, group: list[tuple[LiveModel, Entry]]) -> None:
        """Run requests of one or more models in one call."""
        verb = type(group[0][1].request)
        try:
            prepared = [entry.prepared for _, entry in group]
            results = await self._thread.call(verb.run_batch, self._backend, prepared)
            if len(results) != len(group):
                raise ServerError(f"the backend returned {len(results)} results for {len(group)} requests")
        except BackendLostError:
            raise
        except Exception as error:
            # An error for the call as a whole is the request's own if the call had one request.
            wrapped = error if len(group) == 1 or not isinstance(error, UserError) else ServerError(str(error))
            results = [wrapped] * len(group)
        gone = next((result for result in results if isinstance(result, BackendLostError)), None)
        if gone is not None:
            raise gone
        # The next request of these models may run while the results are stored.
        for model, _ in group:
            self._release(model)
        for (model, entry), result in zip(group, results, strict=True):
            if isinstance(result, Exception):
                self._spawn(self._refuse(entry, result))
                continue
            columns = verb.columns(entry.prepared, result)
            if "loss" in columns:
                model.losses.append((entry.seq, columns["loss"], columns["tokens"]))
            self._spawn(self._finish(entry, result, **columns))

    async def _run_one(self, model: LiveModel, entry: Entry) -> None:
        """Run a request that changes one model, or writes it to a folder."""
        try:
            turn = _Turn(
                model=model,
                seq=entry.seq,
                prepared=entry.prepared,
                backend=self._backend,
                registry=self._registry,
                samplers=self._samplers,
                training=self,
                thread=self._thread,
            )
            result = await entry.request.run(turn)
        except BackendLostError:
            raise
        except Exception as error:
            await self._refuse(entry, error)
            # A model that was not created cannot serve the requests that follow.
            if isinstance(entry.request, CreateModel):
                category: Category = "user" if isinstance(error, UserError) else "server"
                await self.close_model(model, "failed", f"{model.id} was not created: {error}", category)
        else:
            if isinstance(entry.request, CreateModel):
                logger.info("%s was created", model.id)
            self._spawn(self._finish(entry, result))
        finally:
            self._release(model)

    # ------------------------------------------------------------------ help

    async def _release_adapter(self, model: LiveModel) -> None:
        """Release the adapter of a closed model."""
        if not model.in_backend:
            return
        model.in_backend = False
        try:
            await self._thread.call(self._backend.delete, model.id)
        except BackendLostError as error:
            await self._lose_models(str(error))
        except Exception:
            logger.exception("the adapter of %s could not be released", model.id)

    async def _lose_models(self, error: str) -> None:
        """Fail all live models after the loss of the backend, and start it again."""
        logger.error("the backend is lost: %s", error)
        lost = list(self.order.models.values())
        paths = await self._registry.last_of([model.id for model in lost])
        for model in lost:
            model.in_backend = False
            await self.close_model(model, "lost", lost_message(model.id, paths.get(model.id), error), "server")
        # The adapters of models that closed before are gone as well.
        self._doomed.clear()
        await self._thread.restart(error)

    async def _finish(self, entry: Entry, result: Any, **columns: Any) -> None:
        done = await self._futures.finish(entry.request_id, result, **columns)
        self.counts[entry.kind, "done" if done else "failed"] += 1

    async def _refuse(self, entry: Entry, error: Any) -> None:
        """Fail a request with the category of its error."""
        user = isinstance(error, UserError)
        if not user and not isinstance(error, ServerError):
            logger.error("%s failed", entry.kind, exc_info=error)
        message = str(error) if isinstance(error, UserError | ServerError) else f"{type(error).__name__}: {error}"
        self.counts[entry.kind, "refused" if user else "failed"] += 1
        entry.log_failure(message)
        await self._futures.fail([entry.request_id], message, "user" if user else "server")

    def end_turn(self) -> None:
        """Let other models have their turns."""
        self._idle.set()
        self._wake.set()

    async def store_state(self, model: LiveModel, state: str) -> None:
        """Store the adapter of a model, and its state."""
        row = {"state": state, "last_request": model.last_request, **(vars(model.spec) if model.spec else {})}

        def work(connection: Connection) -> None:
            connection.execute(update(models).where(models.c.id == model.id).values(**row))

        await self._database.write(work)

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _release(self, model: LiveModel) -> None:
        model.release()
        self._watch_gap(model)

    def _watch_gap(self, model: LiveModel) -> None:
        """Start or stop the time for which requests wait for a missing one."""
        if not model.has_gap():
            self._cancel_gap(model)
        elif model.gap_timer is None:
            loop = asyncio.get_running_loop()
            model.gap_timer = loop.call_later(self._settings.gap_timeout_s, self._fail_gap, model)

    def _cancel_gap(self, model: LiveModel) -> None:
        if model.gap_timer is not None:
            model.gap_timer.cancel()
            model.gap_timer = None

    def _fail_gap(self, model: LiveModel) -> None:
        """Fail what waits for a request that did not arrive. The model goes on waiting for it: an order with a hole would be another one."""
        model.gap_timer = None
        if not model.has_gap():
            return
        late = model.pass_over()
        message = (
            f"the request with seq_id {model.next_seq} of {model.id} did not arrive within {self._settings.gap_timeout_s} s, "
            "and later ones wait for it: send it, or create the model from its last checkpoint"
        )
        self._spawn(self._futures.fail([entry.request_id for entry in late], message, "user"))


@dataclass(frozen=True, eq=False, kw_only=True)
class _Turn(RequestTurn):
    """A turn of the dispatcher."""

    model: LiveModel
    training: Training
    thread: BackendThread

    async def call(self, function: Callable[..., _T], *args: Any) -> _T:
        result = await self.thread.call(function, *args)
        self.training.end_turn()
        return result

    async def require_backend(self) -> None:
        await self.thread.need()

    async def store_model(self) -> None:
        # The model may have closed while the backend created it.
        await self.training.store_state(self.model, "live" if self.model.closed is None else "released")

    async def release_model(self, reason: str) -> None:
        # This request is answered when it ends.
        self.model.running = ()
        await self.training.close_model(self.model, "released", reason, "user")
