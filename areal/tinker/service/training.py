"""Execution of training requests: one task takes them in order, one thread runs the backend."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from functools import partial
from typing import Any

from areal.tinker.backends.backend import TrainingBackend
from areal.tinker.backends.errors import BackendAwayError, BackendLostError, ServerError, UserError
from areal.tinker.service.backend_thread import BackendThread, BackendTurns, EndTurn
from areal.tinker.service.checkpoints import CheckpointRegistry, lost_message
from areal.tinker.service.order import Entry, LiveModel, Order
from areal.tinker.service.recovery.recovery import Recovery
from areal.tinker.service.recovery.survivors import MAX_ATTEMPTS
from areal.tinker.service.sampling import Samplers
from areal.tinker.service.settings import ServiceSettings
from areal.tinker.service.store.database import Database
from areal.tinker.service.store.futures import Category, Futures
from areal.tinker.service.verbs.models import CreateModel
from areal.tinker.service.verbs.verb import Capabilities, RequestTurn

MAX_MODELS_PER_CALL = 64
"""Most requests, each of another model, that are given to a backend in one call. The backend divides them into passes."""

_STOP_S = 10.0
"""Seconds for which the end of the server waits for running requests. Longer ones run again after the restart."""

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
        self._futures, self._registry = futures, registry
        self._samplers, self._settings = samplers, settings
        self.server = Capabilities(backend.limits(), backend.losses(), backend.optimizers(), settings)
        self._recovery = Recovery(backend, self._thread, database, futures, registry, self.server)
        self.order = Order()
        self.counts: Counter[tuple[str, str]] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.tokens = 0
        self._wake = asyncio.Event()
        self._turns = BackendTurns()
        self._doomed: deque[LiveModel] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._dispatcher: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the dispatcher."""
        self._dispatcher = asyncio.get_running_loop().create_task(self._dispatch())

    async def stop(self) -> None:
        """Stop the dispatcher, wait for what runs, and store all models, so that the next server need not run their requests again."""
        self.halt()
        self._recovery.stopping = True
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_STOP_S)
        idle = [each for each in self.order.models.values() if each.steps and not each.busy and not each.asleep]
        stored = (self._recovery.store(model, model.next_seq - 1) for model in idle)
        await asyncio.gather(*stored, return_exceptions=True)
        tasks = [*self._tasks, *([self._dispatcher] if self._dispatcher else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._thread.stop()
        await self._note_begun()

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
        model.cancel_gap()
        failed = [*(entry.request_id for entry in model.waiting.values()), *model.running]
        model.waiting.clear()
        self._doomed.append(model)
        self._wake.set()
        # First the state of the model, which clients may read after a failure. The running request fails, too, before the backend ends it.
        try:
            await self._recovery.store_state(model, state)
        finally:
            await self._futures.fail(failed, reason, category)
            await self._recovery.remove(model)

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
        end_turn = await self._turns.take()
        if self._doomed:
            await self._release_adapter(self._doomed.popleft())
            end_turn()
            return True
        if (asleep := self.order.next_asleep()) is not None:
            self._spawn(self._restore(asleep, end_turn))
            return True
        batched = self._backend.batches_models()
        group = self.order.next_group(MAX_MODELS_PER_CALL if batched else 1)
        if not group:
            end_turn()
            return False
        for model, entry in group:
            model.running = (entry.request_id,)
        self._spawn(self._run_group(group, end_turn))
        return True

    async def _run_group(self, group: list[tuple[LiveModel, Entry]], end_turn: EndTurn) -> None:
        """Run the requests of one turn."""
        started = time.monotonic()
        try:
            await self._note_begun(*group)
            if group[0][1].request.batched:
                await self._run_batch(group)
            else:
                await self._run_one(*group[0], end_turn)
        except BackendLostError as error:
            await self._lose_models(str(error), group)
        except Exception:
            # A defect in the handling of one request must not leave it without an answer.
            logger.exception("a training request could not be handled")
            message = "the server could not handle the request; its log says why"
            await self._futures.fail([entry.request_id for _, entry in group], message, "server")
        finally:
            for model, _ in group:
                model.running = ()
            self.seconds[group[0][1].kind] += time.monotonic() - started
            end_turn()

    async def _note_begun(self, *begun: tuple[LiveModel, Entry]) -> None:
        """Store which requests are about to run; without any, that none runs."""
        if self._settings.recovery:
            seqs = {model.id: entry.seq for model, entry in begun}
            await (self._futures.note_begun(seqs) if seqs else self._futures.forget_begun())

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
            model.pending = model.pending or verb.changes_model
            columns = verb.columns(entry.prepared, result)
            self.tokens += columns.get("tokens", 0)
            if "loss" in columns:
                model.losses.append((entry.seq, columns["loss"], columns["tokens"]))
            self._spawn(self._finish(entry, result, **columns))

    async def _run_one(self, model: LiveModel, entry: Entry, end_turn: EndTurn) -> None:
        """Run a request that changes one model, or writes it to a folder."""
        try:
            result = await self._execute(model, entry, end_turn)
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
            if self._recovery.due(model):
                await self._store(model, entry.seq)
        finally:
            self._release(model)

    async def _execute(self, model: LiveModel, entry: Entry, end_turn: EndTurn = lambda: None) -> Any:
        """Run a request alone, and note whether gradients wait afterwards. A model that is restored keeps the backend."""
        request = entry.request
        if request.changes_model:
            model.pending = True
        try:
            if request.batched:
                (result,) = await self._thread.call(request.run_batch, self._backend, [entry.prepared])
                if isinstance(result, Exception):
                    raise result
                return result
            turn = RequestTurn(
                model=model,
                seq=entry.seq,
                prepared=entry.prepared,
                backend=self._backend,
                registry=self._registry,
                samplers=self._samplers,
                thread=self._thread,
                end_turn=end_turn,
                store_state=partial(self._recovery.store_state, model),
                release_model=partial(self._release_model, model),
            )
            return await request.run(turn)
        finally:
            if request.uses_gradients:
                model.pending, model.steps = False, model.steps + 1

    # ------------------------------------------------------------------ recovery

    async def _store(self, model: LiveModel, seq: int) -> None:
        """Store a model from which a restart goes on after the request with the number ``seq``."""
        end_turn = await self._turns.take()
        try:
            await self._recovery.store(model, seq)
        except BackendLostError as error:
            await self._lose_models(str(error))
        finally:
            end_turn()

    async def _restore(self, model: LiveModel, end_turn: EndTurn) -> None:
        """Restore a model in a turn, in which the backend does nothing else."""
        head, model.busy = model.head(), True
        try:
            await self._note_begun(*([(model, head)] if head else []))
            await self._recovery.restore(model, self._execute)
            await self._note_begun()
        except BackendLostError as error:
            await self._lose_models(str(error), [(model, head)])
        except BackendAwayError as error:
            await self._futures.fail([entry.request_id for entry in model.pass_over()], str(error), "server")
        except Exception as error:
            logger.error("%s could not be restored", model.id, exc_info=error)
            await self._lose_model(model, f"it could not be restored: {error}")
        finally:
            end_turn()
        if model.loaded and not model.asleep:
            await self._store(model, model.next_seq - 1)
        self._release(model)

    async def save_timed_out(self, model: LiveModel) -> str | None:
        """Call :meth:`~areal.tinker.service.recovery.recovery.Recovery.save_timed_out` if there is anything to save."""
        if not self._settings.recovery or model.next_seq <= 1:
            return None
        if model.asleep:
            await self._restore(model, await self._turns.take())
        return None if model.closed is not None else await self._recovery.save_timed_out(model)

    # ------------------------------------------------------------------ help

    async def _release_model(self, model: LiveModel, reason: str) -> None:
        """End a model in the turn of one of its requests, which is answered when it ends."""
        model.running = ()
        await self.close_model(model, "released", reason, "user")

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

    async def _lose_models(self, error: str, interrupted: Sequence[tuple[LiveModel, Entry | None]] = ()) -> None:
        """Start the backend again after its loss. All models are restored before their next request, unless that is the cause of the loss."""
        logger.error("the backend is lost: %s", error)
        await self._note_begun()
        lost = [] if self._settings.recovery else list(self.order.models.values())
        for model in self.order.models.values():
            model.in_backend = False
        # The requests that it has interrupted run again, a few times; so does the restoration of a model for which none waits.
        for model, entry in interrupted:
            tried = model if entry is None else entry
            tried.attempts += 1
            if tried.attempts >= MAX_ATTEMPTS:
                lost.append(model)
            elif entry is not None and self._settings.recovery and model.closed is None:
                model.put_back(entry)
        for model in self.order.models.values():
            model.asleep = model.next_seq > 0
        for model in lost:
            await self._lose_model(model, error)
        # The adapters of models that closed before are gone as well.
        self._doomed.clear()
        await self._thread.restart(error)

    async def _lose_model(self, model: LiveModel, error: str) -> None:
        """Fail a model that cannot be restored."""
        path = (await self._registry.last_of([model.id])).get(model.id)
        await self.close_model(model, "lost", lost_message(model.id, path, error), "server")

    async def _finish(self, entry: Entry, result: Any, **columns: Any) -> None:
        again = entry.request.changes_model
        done = await self._futures.finish(entry.request_id, result, runs_again=again, **columns)
        self.counts[entry.kind, "done" if done else "failed"] += 1

    async def _refuse(self, entry: Entry, error: Any) -> None:
        """Fail a request with the category of its error."""
        user = isinstance(error, UserError)
        if not user and not isinstance(error, ServerError):
            logger.error("%s failed", entry.kind, exc_info=error)
        message = str(error) if isinstance(error, UserError | ServerError) else f"{type(error).__name__}: {error}"
        self.counts[entry.kind, "refused" if user else "failed"] += 1
        entry.log_failure(message)
        again = entry.request.uses_gradients
        await self._futures.fail([entry.request_id], message, "user" if user else "server", runs_again=again)

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _release(self, model: LiveModel) -> None:
        """Let the next request of a model run."""
        model.release()
        self._watch_gap(model)
        self._wake.set()

    def _watch_gap(self, model: LiveModel) -> None:
        """Start or stop the time for which requests wait for a missing one."""
        if not model.has_gap():
            model.cancel_gap()
        elif model.gap_timer is None:
            loop = asyncio.get_running_loop()
            model.gap_timer = loop.call_later(self._settings.gap_timeout_s, self._fail_gap, model)

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
