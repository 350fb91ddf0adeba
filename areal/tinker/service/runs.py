"""Rows of training runs, and the recovery of what an earlier process left unfinished."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from sqlalchemy import Connection, and_, delete, func, insert, select, true, update
from sqlalchemy.exc import IntegrityError

from areal.tinker.service.checkpoints import describe_checkpoint, iso_time, lost_message
from areal.tinker.service.errors import NotFoundError
from areal.tinker.service.model import TrainedModel
from areal.tinker.service.store.database import Database
from areal.tinker.service.store.tables import checkpoints, futures, journal, models, runs_of, sessions

_RESTARTED = "the server was restarted"
_LOST = "the server or its training processes were restarted"
_MOST_CURVES = 100
_OWNED = select(models, sessions.c.owner).join(sessions, sessions.c.id == models.c.session_id)


class Runs:
    """Training runs: one for each model that was ever created.

    Args:
        owner: shown owner of runs from before there were owners.
        last_request: returns the time of a live model's last request, which its row does not have yet.
    """

    def __init__(self, database: Database, owner: str, last_request: Callable[[str], float | None]) -> None:
        self._last_request = last_request
        self._database = database
        self._owner = owner
        self._curves: dict[str, list[tuple[int, float, int]]] = {}

    async def add(self, model: TrainedModel, model_seq_id: int) -> None:
        """Store a new model. A retry of its creation changes nothing."""
        row = {"id": model.id, "session_id": model.session_id, "model_seq_id": model_seq_id, "state": "creating"}
        row |= {"base_model": model.base_model, "optimizer": model.optimizer, "user_metadata": model.user_metadata}
        row |= {"created": model.created, "last_request": model.created}

        def work(connection: Connection) -> None:
            try:
                with connection.begin_nested():
                    connection.execute(insert(models).values(**row))
            except IntegrityError:
                pass

        await self._database.write(work)

    async def row(self, run_id: str) -> Any:
        """Return the row of a run.

        Raises:
            NotFoundError: there is no such run.
        """
        chosen = _OWNED.where(models.c.id == run_id)
        row = await self._database.read(lambda connection: connection.execute(chosen).mappings().first())
        if row is None:
            raise NotFoundError(f"there is no training run {run_id!r}")
        return row

    async def listing(self, owner: str | None, limit: int, offset: int) -> dict[str, Any]:
        """Return the runs of an owner, or of all, in their JSON form, the latest first."""
        mine = true() if owner is None else models.c.id.in_(runs_of(owner))
        page = _OWNED.where(mine).order_by(models.c.created.desc(), models.c.id).limit(limit).offset(offset)
        count = select(func.count()).select_from(models).where(mine)

        def work(connection: Connection) -> dict[str, Any]:
            rows = connection.execute(page).mappings().all()
            last = _last(connection, [row["id"] for row in rows])
            answers = [self._describe(row, last) for row in rows]
            total = connection.execute(count).scalar_one()
            return {"training_runs": answers, "cursor": {"offset": offset, "limit": limit, "total_count": total}}

        return await self._database.read(work)

    async def describe(self, run_id: str) -> dict[str, Any]:
        """Return a run in its JSON form."""
        row = await self.row(run_id)
        return self._describe(row, await self._database.read(lambda connection: _last(connection, [run_id])))

    async def losses(self, run_id: str, limit: int) -> list[tuple[int, float, int]]:
        """Return ``(seq_id, loss, tokens)`` of the last passes of a run that is not alive."""
        if run_id not in self._curves:
            curve = await self.read_losses(run_id, limit)
            # Such a curve does not change. The status page shows a few.
            while len(self._curves) >= _MOST_CURVES:
                del self._curves[next(iter(self._curves))]
            self._curves[run_id] = curve
        return self._curves[run_id]

    async def read_losses(self, run_id: str, limit: int) -> list[tuple[int, float, int]]:
        """Return ``(seq_id, loss, tokens)`` of the last passes of a run."""
        chosen = select(futures.c.seq_id, futures.c.loss, futures.c.tokens)
        chosen = chosen.where(futures.c.model_id == run_id, futures.c.loss.is_not(None))
        chosen = chosen.order_by(futures.c.seq_id.desc()).limit(limit)
        rows = await self._database.read(lambda connection: connection.execute(chosen).all())
        return [(row[0], row[1], row[2]) for row in reversed(rows)]

    async def recover(self, survivors: Collection[str], reasons: Mapping[str, str]) -> None:
        """Fail what an earlier process left unfinished.

        Its models are lost with their training requests, except for the survivors. The result of an unfinished sampling request is gone:
        the client sends it again.

        Args:
            survivors: ids of models that go on.
            reasons: by the ids of other models why they are lost.
        """

        def work(connection: Connection) -> None:
            of_survivors = and_(futures.c.model_id.is_not(None), futures.c.model_id.in_(survivors))
            unfinished = (futures.c.state == "pending") & ~of_survivors
            sampling = futures.c.kind == "sample"
            connection.execute(update(futures).where(unfinished, sampling).values(state="gone", error=_RESTARTED))
            # Each model's error names its own last checkpoint.
            lost = models.c.state.in_(("creating", "live")) & models.c.id.not_in(survivors)
            alive = select(models.c.id).where(lost)
            for run_id in connection.execute(alive).scalars().all():
                reason = _lost(connection, run_id, reasons.get(run_id, _RESTARTED))
                failed = {"state": "failed", "category": "server", "error": reason}
                connection.execute(update(futures).where(unfinished, futures.c.model_id == run_id).values(**failed))
            connection.execute(delete(journal).where(journal.c.model_id.not_in(survivors)))
            connection.execute(update(models).where(lost).values(state="lost", snapshot_uid=None, snapshot_seq=None))
            # Requests of models that closed before.
            rest = {
                "state": "failed",
                "category": "server",
                "error": f"{_RESTARTED} before this request ended: send a new one",
            }
            connection.execute(update(futures).where(unfinished).values(**rest))

        await self._database.write(work)

    async def dead_message(self, run_id: str) -> tuple[str, bool]:
        """Return the error for requests to a model that is not alive, and whether the server is to blame."""
        row = await self.row(run_id)
        if row["state"] == "lost":
            return await self._database.read(lambda connection: _lost(connection, run_id, _LOST)), True
        if row["state"] == "failed":
            return f"{run_id} could not be created: see the error of its creation, and create a new model", False
        last = await self._database.read(lambda connection: _last(connection, [run_id]).get((run_id, "training")))
        way_out = f"one from its last checkpoint, {last['path']}" if last else "one from a checkpoint of it"
        return f"{run_id} was released: create a new model, or {way_out}", False

    def _describe(self, row: Any, last: dict[tuple[str, str], Any]) -> dict[str, Any]:
        training, sampler = (last.get((row["id"], kind)) for kind in ("training", "sampler"))
        return {
            "training_run_id": row["id"],
            "base_model": row["base_model"],
            "model_owner": row["owner"] or self._owner,
            "is_lora": True,
            "corrupted": row["state"] in ("failed", "lost"),
            "lora_rank": row["rank"],
            "last_request_time": iso_time(self._last_request(row["id"]) or row["last_request"]),
            "last_checkpoint": training and describe_checkpoint(training),
            "last_sampler_checkpoint": sampler and describe_checkpoint(sampler),
            "user_metadata": row["user_metadata"],
        }


def _last(connection: Connection, run_ids: list[str]) -> dict[tuple[str, str], Any]:
    """Last checkpoints of runs, by run and kind."""
    kinds = (checkpoints.c.run_id, checkpoints.c.kind)
    latest = select(*kinds, func.max(checkpoints.c.created).label("created")).where(checkpoints.c.run_id.in_(run_ids))
    newest = latest.group_by(*kinds).subquery()
    same = [checkpoints.c[name] == newest.c[name] for name in ("run_id", "kind", "created")]
    chosen = select(checkpoints).join(newest, and_(*same))
    return {(row["run_id"], row["kind"]): dict(row) for row in connection.execute(chosen).mappings()}


def _lost(connection: Connection, run_id: str, reason: str) -> str:
    last = _last(connection, [run_id]).get((run_id, "training"))
    return lost_message(run_id, None if last is None else last["path"], reason)
