"""Registry of checkpoints: rows and folders, which appear and disappear together."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, delete, func, insert, select, update

from areal.tinker.backends.errors import UserError
from areal.tinker.backends.prepared import AdapterSpec
from areal.tinker.service.errors import DiskFullError, NotFoundError
from areal.tinker.service.model import TrainedModel
from areal.tinker.service.params import check_integer, check_metadata
from areal.tinker.service.store.database import Database
from areal.tinker.service.store.files import CheckpointFiles, CheckpointPath, check_name, parse_path
from areal.tinker.service.store.tables import checkpoints, runs_of
from areal.tinker.service.tenants.caller import QuotaChecks

_TEN_YEARS = 10 * 366 * 24 * 3600

logger = logging.getLogger(__name__)


class CheckpointRegistry:
    """Named checkpoints of all runs."""

    def __init__(self, database: Database, files: CheckpointFiles, quotas: QuotaChecks) -> None:
        self._database = database
        self.quotas = quotas
        self.files = files
        self._writing: set[str] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._expiring: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Delete what expired while no server ran, and wait for the next expiry."""
        await self.expire()

    def stop(self) -> None:
        """Stop waiting."""
        if self._timer is not None:
            self._timer.cancel()

    # ------------------------------------------------------------------ save

    async def save(
        self,
        model: TrainedModel,
        kind: str,
        name: str,
        write: Callable[[Path], Awaitable[None]],
        *,
        overwrite: bool,
        ttl_seconds: int | None,
        user_metadata: Mapping[str, str] | None,
        seq_id: int | None = None,
    ) -> str:
        """Write a checkpoint and publish it. Returns its path.

        Args:
            write: writes the folder, atomically.
            seq_id: number of the request. One that runs again after a restart returns the checkpoint that it has saved.

        Raises:
            UserError: the name is taken and ``overwrite`` is false, or the owner's quota is used up.
        """
        path = CheckpointPath(model.id, kind, check_name(name))
        expires = None if ttl_seconds is None else time.time() + check_ttl(ttl_seconds)
        metadata = check_metadata(user_metadata)
        before = await self._row(path)
        if before is not None and seq_id is not None and before["seq_id"] == seq_id:
            return str(path)
        # Two saves of one name must not run at the same time.
        if (before is not None and not overwrite) or str(path) in self._writing:
            raise UserError(f"the checkpoint {path} exists: choose another name, or set overwrite")
        uid = self.files.new_id()
        folder = self.files.folder(path, uid)
        self._writing.add(str(path))
        try:
            await self.check_room(model.owner, str(path))
            self.files.prepare(folder)
            await write(folder)
            size = await asyncio.to_thread(self.files.size, folder)
            row = {
                **_described(path, uid, model),
                "user_metadata": metadata,
                "expires": expires,
                "size_bytes": size,
                "seq_id": seq_id,
            }
            # A save of which anything cannot be written has failed.
            await asyncio.to_thread(self.files.publish, folder, row)
            await self._database.write(lambda connection: self._replace(connection, model.owner, row))
        except BaseException:
            await asyncio.to_thread(self.files.remove, folder)
            raise
        finally:
            self._writing.discard(str(path))
        # Remove the folder that the new one replaces.
        if before is not None:
            await asyncio.to_thread(self.files.remove, self.files.folder(path, before["uid"]))
        if expires is not None:
            self._arm(expires)
        logger.info("%s was saved: %d bytes", path, size)
        return str(path)

    # ------------------------------------------------------------------ read

    async def find(self, path: Any, kind: str | None = None) -> tuple[CheckpointPath, Mapping[str, Any], Path]:
        """Return path, row and folder of a checkpoint that a request names.

        Raises:
            NotFoundError: there is no such checkpoint.
            UserError: the path is malformed, or names a checkpoint of another kind.
        """
        parsed = parse_path(path)
        if kind is not None and parsed.kind != kind:
            other = "save_state" if kind == "training" else "save_weights_for_sampler"
            raise UserError(f"path is {path!r}, a {parsed.kind} checkpoint: this request needs one of {other}")
        row = await self._row(parsed)
        if row is None:
            raise no_checkpoint(parsed)
        return parsed, row, self.files.folder(parsed, row["uid"])

    async def check_room(self, owner: str, replaced: str | None = None) -> None:
        """Check that an owner may store something more.

        Raises:
            UserError: the owner's quota is used up.
            DiskFullError: the disk has no room.
        """
        self._database.check_room()
        await self._database.read(lambda connection: self.quotas.check_stored(connection, owner, 1, replaced))

    async def is_public(self, path: CheckpointPath) -> bool:
        """Return whether there is a public checkpoint of this path."""
        row = await self._row(path)
        return row is not None and row["public"]

    async def last_of(self, run_ids: list[str]) -> dict[str, str]:
        """Return the path of the last training checkpoint of each run that has one."""

        def work(connection: Connection) -> dict[str, str]:
            chosen = select(checkpoints).where(
                checkpoints.c.run_id.in_(run_ids), checkpoints.c.kind == "training", _valid()
            )
            return {
                row["run_id"]: row["path"]
                for row in connection.execute(chosen.order_by(checkpoints.c.created)).mappings()
            }

        return await self._database.read(work)

    async def listing(
        self, *, run_id: str | None = None, owner: str | None = None, limit: int | None = None, offset: int = 0
    ) -> tuple[list[dict[str, Any]], int]:
        """Return checkpoints of a run, of an owner or all in their JSON form, the latest first, and how many there are."""
        mine = _valid()
        if run_id is not None:
            mine &= checkpoints.c.run_id == run_id
        if owner is not None:
            mine &= checkpoints.c.run_id.in_(runs_of(owner))
        chosen, count = select(checkpoints).where(mine), select(func.count()).select_from(checkpoints).where(mine)
        page = chosen.order_by(checkpoints.c.created.desc(), checkpoints.c.path).limit(limit).offset(offset)

        def work(connection: Connection) -> tuple[list[dict[str, Any]], int]:
            rows = [describe_checkpoint(dict(row)) for row in connection.execute(page).mappings()]
            return rows, connection.execute(count).scalar_one()

        return await self._database.read(work)

    async def known_folders(self) -> set[Path]:
        """Return the folders that rows name."""
        rows = await self._database.read(lambda connection: connection.execute(select(checkpoints)).mappings().all())
        return {self.files.folder(CheckpointPath(row["run_id"], row["kind"], row["name"]), row["uid"]) for row in rows}

    # ------------------------------------------------------------------ change

    async def change(self, path: CheckpointPath, **values: Any) -> None:
        """Change columns of a checkpoint.

        Raises:
            NotFoundError: there is no such checkpoint.
        """
        same = (checkpoints.c.path == str(path)) & _valid()
        changed = await self._database.write(
            lambda c: c.execute(update(checkpoints).where(same).values(**values)).rowcount
        )
        if not changed:
            raise no_checkpoint(path)
        if values.get("expires") is not None:
            self._arm(values["expires"])

    async def delete(self, path: CheckpointPath) -> None:
        """Delete a checkpoint.

        Raises:
            NotFoundError: there is no such checkpoint.
        """
        row = await self._row(path)
        if row is None:
            raise no_checkpoint(path)
        await self._remove([row])

    async def expire(self) -> None:
        """Delete the checkpoints whose time has come, and wait for the next."""

        def work(connection: Connection) -> list[Any]:
            return list(connection.execute(select(checkpoints).where(~_valid())).mappings())

        await self._remove(await self._database.read(work))
        following = await self._database.read(lambda c: c.execute(select(func.min(checkpoints.c.expires))).scalar())
        if following is not None:
            self._arm(following)

    async def _remove(self, rows: list[Any]) -> None:
        """Remove rows, then their folders: those that remain after a crash are cleaned by the next start."""
        if not rows:
            return
        uids = [row["uid"] for row in rows]
        folders = [
            self.files.folder(CheckpointPath(row["run_id"], row["kind"], row["name"]), row["uid"]) for row in rows
        ]

        def forget(connection: Connection) -> None:
            connection.execute(delete(checkpoints).where(checkpoints.c.uid.in_(uids)))

        await asyncio.to_thread(self.files.unpublish, *folders)
        try:
            await self._database.write(forget)
        except DiskFullError:
            # The folders make room for the write.
            await asyncio.to_thread(self.files.remove, *folders)
            await self._database.write(forget)
        await asyncio.to_thread(self.files.remove, *folders)

    def _replace(self, connection: Connection, owner: str, row: dict[str, Any]) -> None:
        self.quotas.check_stored(connection, owner, row["size_bytes"], row["path"])
        connection.execute(delete(checkpoints).where(checkpoints.c.path == row["path"]))
        connection.execute(insert(checkpoints).values(**row))

    async def _row(self, path: CheckpointPath) -> Any:
        chosen = select(checkpoints).where(checkpoints.c.path == str(path), _valid())
        return await self._database.read(lambda connection: connection.execute(chosen).mappings().first())

    def _arm(self, expires: float) -> None:
        """Wait until the next expiry, unless an earlier one is awaited."""
        loop = asyncio.get_running_loop()
        when = loop.time() + max(0.0, expires - time.time()) + 0.01
        if self._timer is not None and not self._timer.cancelled() and loop.time() < self._timer.when() <= when:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_at(when, self._expire_now)

    def _expire_now(self) -> None:
        self._expiring = asyncio.get_running_loop().create_task(self._expire_logged())

    async def _expire_logged(self) -> None:
        try:
            await self.expire()
        except Exception:
            logger.exception("expired checkpoints could not be deleted")


def check_ttl(ttl_seconds: Any) -> int:
    """Return a time to live."""
    return check_integer("ttl_seconds", ttl_seconds, 1, _TEN_YEARS)


def checkpoint_of(run_id: str, checkpoint_id: str) -> CheckpointPath:
    """Return the path of ``weights/<name>`` or ``sampler_weights/<name>`` of a run.

    Raises:
        NotFoundError: the ids are malformed.
    """
    try:
        return parse_path(f"tinker://{run_id}/{checkpoint_id}")
    except UserError as error:
        raise NotFoundError(f"there is no checkpoint {checkpoint_id!r} of the run {run_id!r}") from error


def no_checkpoint(path: CheckpointPath) -> NotFoundError:
    """Return the error for a checkpoint that does not exist."""
    return NotFoundError(
        f"path is {str(path)!r}: there is no such checkpoint; it may have been deleted, or have expired"
    )


def spec_of(row: Mapping[str, Any]) -> AdapterSpec:
    """Return the adapter that a row of a model or a checkpoint describes."""
    return AdapterSpec(**{field.name: row[field.name] for field in dataclasses.fields(AdapterSpec)})


def lost_message(model_id: str, path: str | None, reason: str) -> str:
    """Return the error for requests to a model that was lost."""
    way_out = (
        f"create a model from its last checkpoint, {path} (create_training_client_from_state_with_optimizer)"
        if path
        else "it has no checkpoint: create a new model"
    )
    return f"{model_id} was lost with its unfinished requests ({reason}): {way_out}"


def iso_time(seconds: float) -> str:
    """Return seconds since the epoch as an ISO 8601 time with its zone."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def describe_checkpoint(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON form of a checkpoint."""
    return {
        "checkpoint_id": CheckpointPath(row["run_id"], row["kind"], row["name"]).checkpoint_id,
        "checkpoint_type": row["kind"],
        "time": iso_time(row["created"]),
        "tinker_path": row["path"],
        "size_bytes": row["size_bytes"],
        "public": row["public"],
        "user_metadata": row["user_metadata"],
        "expires_at": None if row["expires"] is None else iso_time(row["expires"]),
    }


def _valid() -> Any:
    """Condition that a checkpoint is still valid."""
    return checkpoints.c.expires.is_(None) | (checkpoints.c.expires > time.time())


def _described(path: CheckpointPath, uid: str, model: TrainedModel) -> dict[str, Any]:
    if model.spec is None:
        raise RuntimeError(f"{model.id} has no adapter")
    row = {"path": str(path), "run_id": path.run_id, "kind": path.kind, "name": path.name, "uid": uid, "public": False}
    return (
        row | vars(model.spec) | {"base_model": model.base_model, "optimizer": model.optimizer, "created": time.time()}
    )
