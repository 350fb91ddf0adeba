"""Sampling sessions, the snapshots that they keep open, and their requests, which run concurrently."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
import uuid
from collections import Counter
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from sqlalchemy import Connection, delete, insert, select, update
from sqlalchemy.exc import IntegrityError

from areal.tinker.backends.backend import SamplingBackend
from areal.tinker.backends.errors import ServerError, UserError
from areal.tinker.backends.prepared import SamplingRequest, SamplingResult, TopLogprobs
from areal.tinker.service.checkpoints import CheckpointRegistry
from areal.tinker.service.errors import BusyError, ConflictError, NotFoundError, SessionOverError
from areal.tinker.service.params import check_base_model, check_sampling
from areal.tinker.service.requests import Sample, Submitted
from areal.tinker.service.settings import ServiceSettings
from areal.tinker.service.snapshots import Snapshots
from areal.tinker.service.store.database import Database
from areal.tinker.service.store.files import parse_path
from areal.tinker.service.store.futures import Futures, Key
from areal.tinker.service.store.tables import sampling_sessions

NO_SAMPLER = "this server has no sampler: it was started without one"

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Session:
    """A sampling session of this process. ``uid`` names its weights; ``None`` is the base model."""

    id: str
    session_id: str | None
    uid: str | None
    folder: Path | None
    ephemeral: bool = False
    requests: set[str] = field(default_factory=set)
    used: float = field(default_factory=time.monotonic)


class Samplers:
    """Sampling sessions and their requests."""

    def __init__(
        self,
        backend: SamplingBackend | None,
        database: Database,
        futures: Futures,
        registry: CheckpointRegistry,
        settings: ServiceSettings,
    ) -> None:
        self._backend = backend
        self._database = database
        self._futures = futures
        self._registry = registry
        self._settings = settings
        self._sessions: dict[str, _Session] = {}
        self._snapshots = None if backend is None else Snapshots(backend, settings.max_open_snapshots)
        self._users: Counter[str | None] = Counter()
        self._background: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._running = asyncio.Semaphore(settings.running_samples)
        self.counts: Counter[tuple[str, str]] = Counter()
        self.seconds = 0.0
        self.tokens = 0

    @property
    def queued(self) -> int:
        """Number of requests that wait or run."""
        return len(self._tasks)

    @property
    def available(self) -> bool:
        """True if the server can sample."""
        return self._backend is not None

    async def stop(self) -> None:
        """Stop all requests. They stay unfinished, so that the next server lets clients send them again."""
        self._stopping = True
        tasks = [*self._tasks.values(), *self._background]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._snapshots is not None:
            await self._snapshots.stop()

    # ------------------------------------------------------------------ sessions

    async def create(
        self,
        session_id: str,
        seq_id: int | None,
        base_model: str | None,
        model_path: str | None = None,
        uid: str | None = None,
        run_id: str | None = None,
        owner: str = "",
        size_bytes: int = 0,
    ) -> str:
        """Create a sampling session. Returns its id; a retry returns the same.

        Args:
            uid, run_id, owner, size_bytes: name, model, owner and bytes of an ephemeral snapshot.

        Raises:
            UserError: there is no such checkpoint or base model, the weights are damaged, or the owner's quota is used up.
        """
        if self._snapshots is None:
            raise UserError(NO_SAMPLER)
        # Weights: ephemeral, named or those of the base model.
        if model_path is not None:
            _, row, _ = await self._registry.find(model_path, "sampler")
            if base_model is not None and check_base_model(base_model, self._settings) != row["base_model"]:
                raise UserError(
                    f"model_path is {model_path!r}, of the base model {row['base_model']!r}, not of {base_model!r}"
                )
            uid, base_model = row["uid"], row["base_model"]
        elif base_model is None:
            raise UserError("base_model and model_path are missing: give one of them")
        else:
            base_model = check_base_model(base_model, self._settings)
        name = f"{session_id}:sample:{seq_id if seq_id is not None else uuid.uuid4().hex}"
        row = {"id": name, "session_id": session_id, "seq_id": seq_id, "state": "live", "base_model": base_model}
        row |= {
            "model_path": model_path,
            "uid": uid,
            "run_id": run_id,
            "created": time.time(),
            "size_bytes": size_bytes,
        }

        def store(connection: Connection) -> Any:
            if size_bytes:
                self._registry.quotas.check_stored(connection, owner, size_bytes)
            return _insert(connection, row)

        found = await self._database.write(store)
        if found is not None:
            if (found["model_path"], found["base_model"], found["run_id"]) != (model_path, base_model, run_id):
                raise ConflictError(
                    f"sampling_session_seq_id {seq_id} of {session_id} belongs to another sampling session"
                )
            return name
        # Read the weights now: the folder may be overwritten or deleted.
        try:
            session = await self._session(name)
            async with self._snapshots.use(session.uid, session.folder):
                pass
        except BaseException:
            await self.end(name)
            gone = delete(sampling_sessions).where(sampling_sessions.c.id == name)
            await self._database.write(lambda connection: connection.execute(gone))
            raise
        return name

    async def describe(self, name: str) -> dict[str, Any]:
        """Return the JSON form of a sampling session."""
        row = await self._row(name)
        answer = {"sampler_id": name, "base_model": row["base_model"]}
        return answer | ({"model_path": row["model_path"]} if row["model_path"] else {})

    async def end(self, name: str) -> None:
        """End a sampling session: its requests fail, and its weights are released."""
        over = update(sampling_sessions).where(sampling_sessions.c.id == name).values(state="over")
        await self._database.write(lambda connection: connection.execute(over))
        session = self._sessions.pop(name, None)
        if session is None:
            return
        for request_id in list(session.requests):
            self.cancel(request_id)
        self._users[session.uid] -= 1
        if self._users[session.uid] <= 0:
            del self._users[session.uid]
            if self._snapshots is not None:
                await self._snapshots.close(session.uid)
        if session.ephemeral and session.folder is not None:
            await asyncio.to_thread(self._registry.files.remove, session.folder)

    async def end_all_of(self, session_id: str) -> None:
        """End the sampling sessions of a session."""
        live = (sampling_sessions.c.session_id == session_id) & (sampling_sessions.c.state == "live")
        names = await self._database.read(
            lambda c: c.execute(select(sampling_sessions.c.id).where(live)).scalars().all()
        )
        for name in names:
            # Those of an earlier process have a folder, too.
            if name not in self._sessions:
                await self._session(name)
            await self.end(name)

    async def expire(self, idle_s: float) -> None:
        """End sampling sessions of ephemeral snapshots that were not used for ``idle_s``: each one's folder costs disk space."""
        live = (sampling_sessions.c.state == "live") & sampling_sessions.c.run_id.is_not(None)
        names = await self._database.read(
            lambda c: c.execute(select(sampling_sessions.c.id).where(live)).scalars().all()
        )
        for name in names:
            # The time of those of an earlier process begins now.
            session = await self._session(name)
            if not session.requests and time.monotonic() - session.used > idle_s:
                await self.end(name)

    async def known_folders(self) -> set[Path]:
        """Return the folders of ephemeral snapshots of live sessions."""
        live = (sampling_sessions.c.state == "live") & sampling_sessions.c.run_id.is_not(None)
        rows = await self._database.read(lambda c: c.execute(select(sampling_sessions).where(live)).mappings().all())
        return {self._registry.files.ephemeral(row["run_id"], row["uid"]) for row in rows}

    # ------------------------------------------------------------------ requests

    async def session_of(self, request: Sample) -> str | None:
        """Return the client's session to which a request belongs, if it names a sampling session."""
        return (
            None
            if request.sampling_session_id is None
            else (await self._session(request.sampling_session_id)).session_id
        )

    async def submit(self, request: Sample, owner: str) -> Submitted:
        """Store a sampling request of an owner and start it.

        Raises:
            BusyError: too many requests wait, or too many tokens of the owner.
            NotFoundError, SessionOverError: the sampling session does not exist, or has ended.
        """
        if len(self._tasks) >= self._settings.max_samples:
            raise BusyError(f"{len(self._tasks)} sampling requests wait or run: try again later")
        # An old client names weights instead of a session: they are open for this request.
        session, wrong = None, None
        if request.sampling_session_id is not None:
            session = await self._session(request.sampling_session_id)
        tokens = self._tokens(request)
        self._registry.quotas.check_queue(owner, self._futures.queued_tokens[owner], tokens)
        key = Key(request.digest, owner, session.session_id if session else None, tokens=tokens)
        key.sampling_session_id, key.seq_id = (session.id, request.seq_id) if session else (None, None)
        notes = {"record_stability_info": True} if request.record_stability_info else None
        request_id, new = await self._futures.add("sample", key, notes)
        # One id for each answer; the same after a retry.
        ids = tuple(f"{request_id}:{i}" for i in range(self._answers(request)))
        if new:
            try:
                if self._backend is None:
                    raise UserError(NO_SAMPLER)
                self._registry.quotas.check_tokens(owner, tokens)
                prepared = check_sampling(request, self._backend.limits(), self._settings)
                self._start(request_id, session, request, prepared)
            except UserError as error:
                wrong = str(error)
            except Exception as error:
                # Content that validation does not foresee must not reach the sampler, nor leave a future without an answer.
                wrong = f"the request could not be read: {type(error).__name__}: {error}"
        if wrong is not None:
            self.counts["sample", "refused"] += 1
            await self._futures.fail([request_id], wrong, "user")
        return Submitted(request_id, sample_sequence_ids=ids)

    def cancel(self, request_id: str) -> None:
        """Stop a request, if it is one of sampling and not finished."""
        task = self._tasks.get(request_id)
        if task is not None:
            task.cancel()

    def _tokens(self, request: Sample) -> int:
        """Tokens of the prompt and of the answers that a request asks for."""
        prompt = sum(len(chunk.tokens) for chunk in request.prompt if chunk.tokens is not None)
        longest = 0 if self._backend is None else max(0, self._backend.limits().max_tokens - prompt)
        params = request.sampling_params  # not validated yet
        asked = params.get("max_tokens") if isinstance(params, Mapping) else None
        answer = min(asked, longest) if isinstance(asked, int) and asked > 0 else longest
        return prompt + answer * self._answers(request)

    def _answers(self, request: Sample) -> int:
        """Return the number of answers that a request asks for, within bounds: it is not validated yet."""
        count = request.num_samples if isinstance(request.num_samples, int) else 1
        return max(1, min(count, self._settings.max_num_samples))

    def _start(self, request_id: str, session: _Session | None, request: Sample, prepared: SamplingRequest) -> None:
        task = asyncio.get_running_loop().create_task(self._run(request_id, session, request, prepared))
        self._tasks[request_id] = task
        if session is not None:
            session.requests.add(request_id)
            session.used = time.monotonic()

        def done(task: asyncio.Task[None]) -> None:
            del self._tasks[request_id]
            if session is not None:
                session.requests.discard(request_id)
            # A task that is cancelled before its first step does not reach its own handlers.
            if task.cancelled() and not self._stopping:
                message = "the sampling request was cancelled, or its session ended"
                self._spawn(self._futures.fail([request_id], message, "user"))

        task.add_done_callback(done)

    async def _run(self, request_id: str, session: _Session | None, request: Sample, prepared: SamplingRequest) -> None:
        """Sample, and store the result or the failure."""
        try:
            if self._backend is None or self._snapshots is None:
                raise UserError(NO_SAMPLER)
            async with self._running:
                weights = session or await self._named(request)
                async with self._snapshots.use(weights.uid, weights.folder) as snapshot:
                    started = time.monotonic()
                    try:
                        result = await self._backend.sample(snapshot, prepared)
                    finally:
                        weights.used = time.monotonic()
                        self.seconds += weights.used - started
            self.tokens += sum(len(answer.tokens) for answer in result.answers)
            await self._futures.finish(request_id, _mask_prompt(result, request.prompt_logprobs_last_n))
            self.counts["sample", "done"] += 1
        except Exception as error:
            user = isinstance(error, UserError)
            if not user and not isinstance(error, ServerError):
                logger.exception("sampling failed")
            self.counts["sample", "refused" if user else "failed"] += 1
            await self._futures.fail([request_id], str(error) or type(error).__name__, "user" if user else "server")

    # ------------------------------------------------------------------ weights

    async def _session(self, name: str) -> _Session:
        """Return a live sampling session. One of an earlier process is opened by its next request."""
        if name in self._sessions:
            return self._sessions[name]
        row = await self._row(name)
        if row["state"] != "live":
            raise SessionOverError(f"the sampling session {name} has ended")
        folder, ephemeral = None, row["run_id"] is not None
        if ephemeral:
            folder = self._registry.files.ephemeral(row["run_id"], row["uid"])
        elif row["uid"] is not None:
            folder = self._registry.files.folder(parse_path(row["model_path"]), row["uid"])
        # Another request may have come first.
        if name not in self._sessions:
            self._users[row["uid"]] += 1
            self._sessions[name] = _Session(name, row["session_id"], row["uid"], folder, ephemeral)
        return self._sessions[name]

    async def _named(self, request: Sample) -> _Session:
        """Weights that a request names without a session."""
        if request.model_path is not None:
            _, row, folder = await self._registry.find(request.model_path, "sampler")
            return _Session("", None, row["uid"], folder)
        if request.base_model is None:
            raise UserError("sampling_session_id, base_model and model_path are missing: give one of them")
        check_base_model(request.base_model, self._settings)
        return _Session("", None, None, None)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _row(self, name: str) -> Any:
        chosen = select(sampling_sessions).where(sampling_sessions.c.id == name)
        row = await self._database.read(lambda connection: connection.execute(chosen).mappings().first())
        if row is None:
            raise NotFoundError(f"there is no sampling session {name!r}")
        return row


def _insert(connection: Connection, row: dict[str, Any]) -> Any:
    """Insert a sampling session. Returns the one that has its id already."""
    try:
        with connection.begin_nested():
            connection.execute(insert(sampling_sessions).values(**row))
        return None
    except IntegrityError:
        return connection.execute(select(sampling_sessions).where(sampling_sessions.c.id == row["id"])).mappings().one()


def _mask_prompt(result: SamplingResult, last: int | None) -> SamplingResult:
    """Keep the log-probs of the last tokens of the prompt only."""
    if last is None or result.prompt_logprobs is None:
        return result
    kept = np.arange(len(result.prompt_logprobs)) >= len(result.prompt_logprobs) - last
    logprobs, top = np.where(kept, result.prompt_logprobs, np.nan).astype(np.float32), result.prompt_top
    if top is not None:
        top = TopLogprobs(np.where(kept[:, None], top.ids, 0), np.where(kept[:, None], top.logprobs, np.nan))
    return dataclasses.replace(result, prompt_logprobs=logprobs, prompt_top=top)
