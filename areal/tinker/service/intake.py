"""Arrival of training requests: number, storage, validation, then the queue of their model."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from areal.tinker.backends.errors import UserError
from areal.tinker.service.errors import BusyError, SessionOverError
from areal.tinker.service.order import Entry, LiveModel
from areal.tinker.service.params import check_integer, check_metadata
from areal.tinker.service.requests import Submitted
from areal.tinker.service.runs import Runs
from areal.tinker.service.sessions import Sessions
from areal.tinker.service.store.futures import Category, Futures, Key
from areal.tinker.service.tenants.caller import QuotaChecks
from areal.tinker.service.training import Training
from areal.tinker.service.verbs.models import CreateModel
from areal.tinker.service.verbs.optimizer import check_optimizer
from areal.tinker.service.verbs.verb import ModelRequest, TrainingRequest


class Intake:
    """Accepts requests that train. A request is stored before it is acknowledged, and validated before it can run."""

    def __init__(
        self,
        training: Training,
        futures: Futures,
        runs: Runs,
        sessions: Sessions,
        quotas: QuotaChecks,
    ) -> None:
        self.server = training.server
        self._training = training
        self._futures = futures
        self._runs = runs
        self._sessions = sessions
        self._quotas = quotas
        self._creating: Counter[str] = Counter()
        self._thread = ThreadPoolExecutor(1, "tinker-validation")
        self.counts: Counter[tuple[str, str]] = Counter()

    def stop(self) -> None:
        """End the thread of validation."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def create(self, request: CreateModel, owner: str) -> Submitted:
        """Accept the creation of a model of an owner, which is the request with the number 0 of its order."""
        self._sessions.touch(request.session_id)
        seq = check_integer("model_seq_id", request.model_seq_id, 0, 10**9)
        model_id = f"{request.session_id}:train:{seq}"
        key = Key(request.digest, owner, request.session_id, model_id, seq_id=0)
        request_id, new = await self._futures.add(request.kind, key, journaled=self._journaled(request))
        if not new:
            return Submitted(request_id, model_id)
        # The model exists from here on, so that its next request may arrive.
        entry = Entry(request_id, request)
        try:
            base_model = request.canonical_base_model(self.server.settings)
            optimizer = check_optimizer(request.optimizer_config, self.server.optimizers)
            metadata = check_metadata(request.user_metadata)
            model = LiveModel(model_id, request.session_id, owner, base_model, optimizer, user_metadata=metadata)
            entry.prepared = request.check(model, self.server)
            live = sum(other.owner == owner for other in self._training.order.models.values())
            self._quotas.check_adapters(owner, live + self._creating[owner])
        except UserError as error:
            await self._reject(entry, str(error), "user")
            return Submitted(request_id, model_id)
        except Exception as error:
            # Content that validation does not foresee.
            await self._reject(entry, f"the request could not be read: {type(error).__name__}: {error}", "user")
            return Submitted(request_id, model_id)
        self._creating[owner] += 1
        try:
            await self._runs.add(model, seq)
        except Exception as error:
            # The stored request must not wait for ever.
            await self._reject(entry, f"the model could not be stored: {error}", "server")
            return Submitted(request_id, model_id)
        finally:
            self._creating[owner] -= 1
        # The session may have ended meanwhile.
        try:
            self._sessions.touch(request.session_id)
        except SessionOverError as error:
            await self._reject(entry, str(error), "user")
            return Submitted(request_id, model_id)
        self._training.add_model(model)
        self._training.put(model, entry)
        return Submitted(request_id, model_id)

    async def submit(self, request: ModelRequest, owner: str) -> Submitted:
        """Accept a request to a model of an owner."""
        if request.seq_id is not None:
            check_integer("seq_id", request.seq_id, 1, 2**62)
        model = self._training.order.models.get(request.model_id)
        if model is None:
            return await self._submit_to_dead(request, owner)
        self._sessions.touch(model.session_id)
        # A full queue must not refuse the request for which the others wait.
        full = model.queued() >= self.server.settings.max_queued_per_model
        full = full or self._training.order.queued() >= self.server.settings.max_queued
        tokens = request.tokens()
        if request.seq_id != model.next_seq:
            if full:
                raise BusyError(f"{model.queued()} requests of {model.id} wait: try again later")
            # Clients send the first chunk of a pass after the others, which must not be refused while they wait for it.
            if not model.has_gap():
                self._quotas.check_queue(owner, self._futures.queued_tokens[owner], tokens)
        # The number is taken before anything can run in between: old clients send none.
        entry = Entry("", request, seq=model.number(request.seq_id))
        model.arriving += 1
        model.last_request = time.time()
        try:
            key = Key(request.digest, owner, model.session_id, model.id, seq_id=entry.seq, tokens=tokens)
            journaled = self._journaled(request)
            entry.request_id, new = await self._futures.add(request.kind, key, request.notes(), journaled)
            if new:
                await self._prepare(model, entry)
        except BaseException:
            # A number that the server gave must not leave a gap.
            if request.seq_id is None:
                entry.refused = True
                self._training.put(model, entry)
            raise
        finally:
            model.arriving -= 1
        return Submitted(entry.request_id, model.id)

    def _journaled(self, request: TrainingRequest) -> TrainingRequest | None:
        """Return the request if its content must be stored."""
        return request if self.server.settings.recovery else None

    async def resume(self, model: LiveModel, entries: list[Entry]) -> None:
        """Accept a model of an earlier process with the requests that it has not finished."""
        self._training.add_model(model)
        for entry in entries:
            tokens = entry.request.tokens()
            key = Key(b"", model.owner, model.session_id, model.id, seq_id=entry.seq, tokens=tokens)
            self._futures.resume(entry.request_id, entry.kind, key)
            # Those that have run have lost their result only, and run again with the model.
            if entry.seq >= model.next_seq:
                await self._prepare(model, entry)

    async def _prepare(self, model: LiveModel, entry: Entry) -> None:
        """Validate a request and put it into its queue. One that is wrong fails now, and its number counts as executed."""
        try:
            self._quotas.check_tokens(model.owner, entry.request.tokens())
            check = partial(entry.request.check, model, self.server)
            # A large request must not stop the loop; the way to the thread takes longer than a small one.
            small = entry.request.is_small()
            loop = asyncio.get_running_loop()
            entry.prepared = check() if small else await loop.run_in_executor(self._thread, check)
            entry.request = entry.request.without_content()
        except UserError as error:
            entry.refused = True
            await self._reject(entry, str(error), "user")
        except Exception as error:
            # Content that validation does not foresee is refused as well: it must not reach the backend.
            entry.refused = True
            await self._reject(entry, f"the request could not be read: {type(error).__name__}: {error}", "user")
        # The model may have closed meanwhile, or have passed over a number that an old client was given.
        if model.closed is not None:
            await self._futures.fail([entry.request_id], model.closed, model.blame)
        elif entry.seq < model.next_seq:
            await self._reject(entry, f"seq_id {entry.seq} of {model.id} was passed over: send a new request", "user")
        else:
            self._training.put(model, entry)

    async def _submit_to_dead(self, request: ModelRequest, owner: str) -> Submitted:
        """Store a request to a model that is not alive, and fail it."""
        row = await self._runs.row(request.model_id)
        key = Key(request.digest, owner, row["session_id"], request.model_id, seq_id=request.seq_id)
        request_id, new = await self._futures.add(request.kind, key)
        if new:
            message, lost = await self._runs.dead_message(request.model_id)
            await self._reject(Entry(request_id, request), message, "server" if lost else "user")
        return Submitted(request_id, request.model_id)

    async def _reject(self, entry: Entry, message: str, category: Category) -> None:
        self.counts[entry.kind, "refused" if category == "user" else "failed"] += 1
        entry.log_failure(message)
        await self._futures.fail([entry.request_id], message, category)
