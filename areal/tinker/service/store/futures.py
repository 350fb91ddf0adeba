"""Futures: stored before they are acknowledged, completed once, and retrieved by waiting on an event."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import Connection, and_, bindparam, delete, insert, select, update
from sqlalchemy.dialects import postgresql, sqlite

from areal.tinker.backends.prepared import decode_result, encode_request, encode_result
from areal.tinker.service.errors import ConflictError, NotFoundError
from areal.tinker.service.requests import FutureState, Outcome
from areal.tinker.service.store.database import Database
from areal.tinker.service.store.tables import futures, journal, models, sessions

Category = Literal["user", "server", "unknown"]
CACHE_BYTES = 2**26
"""Size of the results that are kept in memory for a second retrieval."""

_INSERTS: dict[str, Any] = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}

logger = logging.getLogger(__name__)


def forget_begun(connection: Connection) -> None:
    """Store that no request runs: none is the cause if the server ends."""
    connection.execute(update(models).where(models.c.begun_seq.is_not(None)).values(begun_seq=None))


@dataclass
class Key:
    """Place of a request: its owner, its model or session and its number there. The same place and digest is a retry.

    ``tokens`` are those that it occupies of its owner's quota until it has a result.
    """

    digest: bytes
    owner: str
    session_id: str | None = None
    model_id: str | None = None
    sampling_session_id: str | None = None
    seq_id: int | None = None
    tokens: int = 0


@dataclass
class _Waiting:
    kind: str
    key: Key
    done: asyncio.Future[Outcome]
    claimed: bool = False


class Futures:
    """All requests that have a result later."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: dict[str, _Waiting] = {}
        self._cache: OrderedDict[str, tuple[Outcome, str]] = OrderedDict()
        self._cached = 0
        self._delivered: dict[str, float] = {}
        self.queued_tokens: Counter[str] = Counter()

    def pending(self) -> int:
        """Return the number of requests without a result."""
        return len(self._waiting)

    async def note_begun(self, seqs: Mapping[str, int]) -> None:
        """Store, by model, the number of the request that is about to run: if the server ends, the next one counts it as interrupted."""
        chosen = update(models).where(models.c.id == bindparam("model")).values(begun_seq=bindparam("seq"))
        rows = [{"model": model_id, "seq": seq} for model_id, seq in seqs.items()]
        await self._note(lambda connection: connection.execute(chosen, rows))

    async def forget_begun(self) -> None:
        """Store that no request runs."""
        await self._note(forget_begun)

    async def _note(self, work: Callable[[Connection], object]) -> None:
        # Requests run without this note as well.
        try:
            await self._database.write(work)
        except Exception as error:
            logger.warning("it could not be stored which requests have begun: %s", error)

    async def add(self, kind: str, key: Key, notes: Any = None, journaled: Any = None) -> tuple[str, bool]:
        """Store a new request. Returns its id, and whether it is new: a retry has the id of the first request.

        Args:
            journaled: request whose content is stored as well, so that it can run after a restart.

        Raises:
            ConflictError: the number belongs to another request.
        """
        request_id = uuid.uuid4().hex
        row = {
            "request_id": request_id,
            **vars(key),
            "kind": kind,
            "state": "pending",
            "created": time.time(),
            "notes": notes,
        }
        # A client that guesses the id of a row must find its future.
        self._wait(request_id, _Waiting(kind, key, asyncio.get_running_loop().create_future()))
        try:
            found = await self._database.write(
                lambda connection: _insert(connection, row, None if self._database.full else journaled)
            )
        except BaseException:
            self._stop_waiting(request_id)
            raise
        if found is None:
            return request_id, True
        # Another request has this number.
        waiting = self._stop_waiting(request_id)
        if bytes(found["digest"]) != key.digest or found["kind"] != kind:
            raise ConflictError(
                f"seq_id {key.seq_id} of {key.model_id or key.sampling_session_id} belongs to an earlier {found['kind']} "
                f"request with another content; a new request must have a new seq_id"
            )
        # A result that was lost with an earlier server: this attempt replaces it.
        if found["state"] == "gone" and waiting is not None:
            self._wait(found["request_id"], waiting)
            return found["request_id"], True
        return found["request_id"], False

    async def finish(
        self,
        request_id: str,
        result: Any,
        *,
        loss: float | None = None,
        tokens: int | None = None,
        runs_again: bool = True,
    ) -> bool:
        """Store a result, then wake those that wait. Returns False if the request has failed before.

        Args:
            runs_again: keep the request in the journal: it has changed its model.
        """
        waiting = self._waiting.get(request_id)
        if waiting is None or waiting.claimed:
            return False
        waiting.claimed = True
        # A request that is cancelled now has its result all the same.
        return await asyncio.shield(self._store_result(request_id, waiting, result, loss, tokens, runs_again))

    async def _store_result(
        self,
        request_id: str,
        waiting: _Waiting,
        result: Any,
        loss: float | None,
        tokens: int | None,
        runs_again: bool,
    ) -> bool:

        def store(connection: Connection) -> int:
            blob = encode_result(result)
            done = {"state": "done", "result": blob, "finished": time.time(), "loss": loss, "tokens": tokens}
            connection.execute(update(futures).where(futures.c.request_id == request_id).values(**done))
            if not runs_again:
                connection.execute(delete(journal).where(journal.c.request_id == request_id))
            return len(blob)

        # Acknowledge nothing that is not stored.
        try:
            size = await self._database.write(store)
        except Exception as error:
            logger.exception("the result of %s could not be stored", request_id)
            self._resolve(
                request_id,
                Outcome("failed", waiting.kind, error=f"the result could not be stored: {error}", category="server"),
            )
            return False
        self._resolve(request_id, Outcome("done", waiting.kind, result, result_bytes=size))
        return True

    def resume(self, request_id: str, kind: str, key: Key) -> None:
        """Wait for the result of a request that an earlier process has stored."""
        self._wait(request_id, _Waiting(kind, key, asyncio.get_running_loop().create_future()))

    async def fail(
        self, request_ids: Collection[str], error: str, category: Category, *, runs_again: bool = False
    ) -> None:
        """Store and report a failure. Requests that have a result keep it.

        Args:
            runs_again: keep the requests in the journal: they have changed their model.
        """
        failed = [r for r in request_ids if r in self._waiting and not self._waiting[r].claimed]
        if not failed:
            return
        for request_id in failed:
            self._waiting[request_id].claimed = True
        await asyncio.shield(self._store_failure(failed, error, category, runs_again))

    async def _store_failure(self, failed: list[str], error: str, category: Category, runs_again: bool) -> None:
        row = {"state": "failed", "error": error, "category": category, "finished": time.time()}

        def store(connection: Connection) -> None:
            # A statement has a limit of parameters.
            for i in range(0, len(failed), 500):
                some = failed[i : i + 500]
                connection.execute(update(futures).where(futures.c.request_id.in_(some)).values(**row))
                if not runs_again:
                    connection.execute(delete(journal).where(journal.c.request_id.in_(some)))

        # A failure that cannot be stored is reported all the same: the next server finds the row unfinished and fails it.
        try:
            await self._database.write(store)
        except Exception:
            logger.exception("the failure of %d requests could not be stored", len(failed))
        for request_id in failed:
            if request_id in self._waiting:
                self._resolve(
                    request_id, Outcome("failed", self._waiting[request_id].kind, error=error, category=category)
                )

    async def retrieve(self, request_id: str, timeout_s: float) -> Outcome:
        """Return the state of a request, after at most ``timeout_s`` if it is pending.

        Raises:
            NotFoundError: the request is unknown, or its result was delivered and pruned.
        """
        waiting = self._waiting.get(request_id)
        if waiting is not None:
            # The timeout must not cancel the future of others.
            await asyncio.wait({waiting.done}, timeout=timeout_s)
            if not waiting.done.done():
                return Outcome("pending", waiting.kind)
            outcome = waiting.done.result()
        elif request_id in self._cache:
            outcome, _ = self._cache[request_id]
        else:
            outcome, _ = await self._load(request_id)
        if outcome.state != "pending":
            self._delivered[request_id] = time.time()
        return outcome

    async def owner(self, request_id: str) -> str:
        """Return the owner of a request.

        Raises:
            NotFoundError: the request is unknown, or its result was delivered and pruned.
        """
        if request_id in self._waiting:
            return self._waiting[request_id].key.owner
        if request_id in self._cache:
            return self._cache[request_id][1]
        return (await self._load(request_id))[1]

    def abandon(self, error: str) -> None:
        """Answer all who wait, without storing: another server owns the rows, and lets clients send sampling requests again."""
        for request_id, waiting in list(self._waiting.items()):
            lost = Outcome(
                "gone" if waiting.kind == "sample" else "failed", waiting.kind, error=error, category="server"
            )
            waiting.claimed = True
            self._resolve(request_id, lost)

    async def prune(self, keep_s: float) -> None:
        """Forget results that were delivered, and rows of sessions that ended, more than ``keep_s`` ago."""
        delivered, self._delivered = self._delivered, {}
        old = time.time() - keep_s

        def work(connection: Connection) -> None:
            for request_id, when in delivered.items():
                connection.execute(update(futures).where(futures.c.request_id == request_id).values(delivered=when))
            # A row without its result still tells a retry from a new request.
            connection.execute(
                update(futures)
                .where(futures.c.delivered < old, futures.c.state == "done")
                .values(state="pruned", result=None)
            )
            over = select(sessions.c.id).where(sessions.c.ended < old)
            connection.execute(delete(futures).where(futures.c.session_id.in_(over), futures.c.state != "pending"))
            connection.execute(delete(futures).where(futures.c.session_id.is_(None), futures.c.delivered < old))

        await self._database.write(work)
        # Results that are still wanted are read again.
        self._cache.clear()
        self._cached = 0

    async def _load(self, request_id: str) -> tuple[Outcome, str]:
        """Read the outcome and the owner of a request that ended earlier, or in an earlier process."""

        def work(connection: Connection) -> Any:
            return connection.execute(select(futures).where(futures.c.request_id == request_id)).mappings().first()

        row = await self._database.read(work)
        if row is None or row["state"] == "pruned":
            raise no_request(request_id)
        state: FutureState = row["state"]
        if state == "done":
            blob = bytes(row["result"])
            outcome = Outcome("done", row["kind"], decode_result(blob), result_bytes=len(blob))
            self._keep(request_id, outcome, row["owner"])
        else:
            outcome = Outcome(state, row["kind"], error=row["error"], category=row["category"])
        return outcome, row["owner"]

    def _resolve(self, request_id: str, outcome: Outcome) -> None:
        waiting = self._stop_waiting(request_id)
        if waiting is None:
            return
        self._keep(request_id, outcome, waiting.key.owner)
        if not waiting.done.done():
            waiting.done.set_result(outcome)

    def _wait(self, request_id: str, waiting: _Waiting) -> None:
        self._waiting[request_id] = waiting
        self.queued_tokens[waiting.key.owner] += waiting.key.tokens

    def _stop_waiting(self, request_id: str) -> _Waiting | None:
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            self.queued_tokens[waiting.key.owner] -= waiting.key.tokens
        return waiting

    def _keep(self, request_id: str, outcome: Outcome, owner: str) -> None:
        """Keep an outcome for a retrieval soon, and forget the oldest."""
        self._cache[request_id] = outcome, owner
        self._cached += outcome.result_bytes + 1024
        while self._cached > CACHE_BYTES and len(self._cache) > 1:
            self._cached -= self._cache.popitem(last=False)[1][0].result_bytes + 1024


def no_request(request_id: str) -> NotFoundError:
    """Return the error for a request that does not exist."""
    return NotFoundError(f"request {str(request_id)[:200]!r} is unknown, or its result was delivered and deleted since")


def _insert(connection: Connection, row: dict[str, Any], journaled: Any) -> Any:
    """Insert a row, and the content of its request. Returns the one that has its key already, after renewing it if its result is gone."""
    statement = _INSERTS[connection.dialect.name](futures).values(**row).on_conflict_do_nothing()
    if connection.execute(statement, execution_options={"preserve_rowcount": True}).rowcount == 1:
        if journaled is not None:
            ids = {name: row[name] for name in ("request_id", "model_id", "seq_id")}
            connection.execute(insert(journal).values(**ids, content=encode_request(journaled), attempts=0))
        return None
    place = "model_id" if row["model_id"] is not None else "sampling_session_id"
    same = and_(futures.c[place] == row[place], futures.c.seq_id == row["seq_id"])
    found = connection.execute(select(futures).where(same)).mappings().one()
    if found["state"] == "gone" and bytes(found["digest"]) == row["digest"]:
        again = {"state": "pending", "created": row["created"], "error": None, "category": None}
        connection.execute(update(futures).where(futures.c.request_id == found["request_id"]).values(**again))
    return found
