"""Snapshots of live models, and their restoration from a snapshot and the journal after a restart or a loss of the backend."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, delete, select, update

from areal.tinker.backends.backend import TrainingBackend
from areal.tinker.backends.errors import BackendLostError, ServerError
from areal.tinker.service.backend_thread import BackendThread
from areal.tinker.service.checkpoints import CheckpointRegistry
from areal.tinker.service.order import Entry, LiveModel
from areal.tinker.service.recovery.survivors import changes_model, decode_entry
from areal.tinker.service.store.database import Database
from areal.tinker.service.store.futures import Futures
from areal.tinker.service.store.tables import futures, journal, models
from areal.tinker.service.verbs.verb import Capabilities

Execute = Callable[[LiveModel, Entry], Awaitable[Any]]
"""Runs one request of a model, and returns its result."""

logger = logging.getLogger(__name__)


class Recovery:
    """What a restart needs of live models: the last snapshot of each, and the requests since then.

    A snapshot is written after an optimizer step, since it has no gradients. It cuts the journal. A model is restored from its snapshot, or
    from its creation, and the requests of the journal run again in their order.
    """

    def __init__(
        self,
        backend: TrainingBackend,
        thread: BackendThread,
        database: Database,
        futures: Futures,
        registry: CheckpointRegistry,
        server: Capabilities,
    ) -> None:
        self._backend = backend
        self._thread = thread
        self._database = database
        self._futures = futures
        self._registry = registry
        self._server = server
        self._settings = server.settings
        self._next = 0.0
        self.stopping = False

    # ------------------------------------------------------------------ snapshots

    def due(self, model: LiveModel) -> bool:
        """Return whether a snapshot of a model, which was just changed, is to be written."""
        if model.loaded:
            return True
        now = time.monotonic()
        settings = self._settings
        old = model.steps >= settings.recovery_steps or now - model.stored_at >= settings.recovery_s
        return model.steps > 0 and old and now >= self._next

    async def store(self, model: LiveModel, seq: int) -> None:
        """Write a snapshot of a model that contains its requests up to the number ``seq``, and cut its journal.

        Without room, or while gradients wait, nothing happens: the earlier snapshot and its longer journal stay.

        Raises:
            BackendLostError: the backend was lost. The request with the number ``seq`` has run.
        """
        if not self._settings.recovery or model.pending or model.closed is not None or self._database.full:
            return
        files, started = self._registry.files, time.monotonic()
        uid = files.new_id()
        folder = files.live(model.id, uid)
        try:
            files.prepare(folder)
            await self._thread.call(self._backend.save, model.id, folder)
            kept = await self._database.write(lambda connection: _record(connection, model.id, uid, seq))
        except Exception as error:
            await asyncio.to_thread(files.remove, folder)
            # Not at once again: a disk without room stays without it for a while.
            self._next = time.monotonic() + self._settings.recovery_s
            if isinstance(error, BackendLostError):
                raise
            logger.exception(
                "a snapshot of %s could not be written: a restart runs more of its requests again", model.id
            )
            return
        # A model that has ended meanwhile needs none.
        old, model.stored_uid = (model.stored_uid, uid) if kept else (uid, model.stored_uid)
        model.steps, model.loaded, model.stored_at = 0, False, time.monotonic()
        self._next = model.stored_at + (model.stored_at - started) * (1 / self._settings.recovery_fraction - 1)
        await self._remove_folder(model.id, old)

    async def store_state(self, model: LiveModel, state: str) -> None:
        """Store the adapter of a model, and its state. A restart finds nothing of one that has ended."""
        row = {"state": state, "last_request": model.last_request, **(vars(model.spec) if model.spec else {})}
        row |= {} if state == "live" else {"snapshot_uid": None, "snapshot_seq": None}

        def work(connection: Connection) -> None:
            connection.execute(update(models).where(models.c.id == model.id).values(**row))
            if state != "live":
                connection.execute(delete(journal).where(journal.c.model_id == model.id))

        await self._database.write(work)

    async def remove(self, model: LiveModel) -> None:
        """Delete the snapshot of a model that has ended."""
        uid, model.stored_uid = model.stored_uid, None
        await self._remove_folder(model.id, uid)

    async def _remove_folder(self, model_id: str, uid: str | None) -> None:
        if uid is not None:
            await asyncio.to_thread(self._registry.files.remove, self._registry.files.live(model_id, uid))

    async def save_timed_out(self, model: LiveModel) -> str | None:
        """Save a checkpoint of a model whose client is away. Returns its path; ``None`` without room for it.

        Raises:
            ServerError: the model could not be restored yet.
        """
        if model.asleep:
            raise ServerError(f"{model.id} has timed out, and is not restored yet: it is saved later")

        def write(folder: Path) -> Awaitable[None]:
            return self._thread.call(self._backend.save, model.id, folder)

        kept: dict[str, Any] = {"overwrite": True, "ttl_seconds": self._settings.timeout_keep_s, "user_metadata": None}
        try:
            return await self._registry.save(model, "training", "timed-out", write, **kept)
        except Exception as error:
            logger.warning("%s has timed out and could not be saved: %s", model.id, error)
            return None

    # ------------------------------------------------------------------ restoration

    async def restore(self, model: LiveModel, execute: Execute) -> None:
        """Bring a model to the state that it had after its last finished request.

        Returns early, with the model still asleep, if it is closed or the server stops.

        Args:
            execute: runs a request, and leaves the backend to this model afterwards.

        Raises:
            ServerError: the model cannot be restored. Says why.
            BackendAwayError: the backend cannot be started now.
            BackendLostError: the backend was lost once more.
        """
        started = time.monotonic()
        await self._thread.need()
        # Results that are being stored come first.
        row = await self._database.write(lambda connection: _model_row(connection, model.id))
        if row["snapshot_uid"] is not None:
            folder = self._registry.files.live(model.id, row["snapshot_uid"])
            model.in_backend = True
            model.spec = await self._thread.call(lambda: self._backend.load(model.id, folder, with_optimizer=True))
            model.pending = False
        rows = await self._database.read(lambda connection: _since(connection, row, model.next_seq))
        for request_id, seq, kind, state, is_stored in rows:
            if model.closed is not None or self.stopping:
                return
            if is_stored:
                await self._run_again(model, await self._stored(request_id, seq), state, execute)
            elif state != "failed" and changes_model(kind):
                raise ServerError(
                    f"the content of its request with seq_id {seq} ({kind}) is not stored: the disk was full, or --recovery was off"
                )
        model.asleep = False
        logger.info("%s is restored: %d requests ran again, %.1f s", model.id, len(rows), time.monotonic() - started)

    async def _stored(self, request_id: str, seq: int) -> Entry:
        """Return a request of the journal."""
        chosen = select(journal.c.content).where(journal.c.request_id == request_id)
        content = await self._database.read(lambda connection: connection.execute(chosen).scalar_one())
        return decode_entry(request_id, seq, bytes(content))

    async def _run_again(self, model: LiveModel, entry: Entry, state: str, execute: Execute) -> None:
        """Run a request again. It must end as before; a result that could not be stored is stored now."""
        request = entry.request
        if not request.changes_model and state != "pending":
            return
        failure: Exception | None = None
        try:
            # A large one must not stop the loop.
            check = (model, self._server)
            entry.prepared = (
                request.check(*check) if request.is_small() else await asyncio.to_thread(request.check, *check)
            )
            result = await execute(model, entry)
        except BackendLostError:
            raise
        except Exception as error:
            failure = error
        if (failure is not None) != (state == "failed"):
            now = "has succeeded" if failure is None else f"has failed: {failure}"
            raise ServerError(f"its request with seq_id {entry.seq} ({entry.kind}), run again after a restart, {now}")
        if failure is None:
            columns = request.columns(entry.prepared, result) if request.batched else {}
            await self._futures.finish(entry.request_id, result, **columns)


def _record(connection: Connection, model_id: str, uid: str, seq: int) -> bool:
    """Note the snapshot of a live model, and cut its journal. Returns False if the model has ended."""
    live = (models.c.id == model_id) & (models.c.state == "live")
    changed = connection.execute(update(models).where(live).values(snapshot_uid=uid, snapshot_seq=seq)).rowcount
    if changed:
        connection.execute(delete(journal).where(journal.c.model_id == model_id, journal.c.seq_id <= seq))
    return bool(changed)


def _model_row(connection: Connection, model_id: str) -> Any:
    return connection.execute(select(models).where(models.c.id == model_id)).mappings().one()


def _since(connection: Connection, row: Any, end: int) -> list[tuple[str, int, str, str, bool]]:
    """Return id, number, kind and state of each request after a snapshot and before ``end``, and whether it is in the journal."""
    after = -1 if row["snapshot_seq"] is None else row["snapshot_seq"]
    columns = (futures.c.request_id, futures.c.seq_id, futures.c.kind, futures.c.state, journal.c.request_id)
    joined = select(*columns).outerjoin(journal, journal.c.request_id == futures.c.request_id)
    mine = joined.where(futures.c.model_id == row["id"], futures.c.seq_id > after, futures.c.seq_id < end)
    found = connection.execute(mine.order_by(futures.c.seq_id)).all()
    return [(request_id, seq, kind, state, stored is not None) for request_id, seq, kind, state, stored in found]
