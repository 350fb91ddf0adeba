"""Sessions of clients: alive while requests or heartbeats arrive, then over."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, func, insert, select, true, update

from areal.tinker.service.errors import SessionOverError
from areal.tinker.service.store.database import Database
from areal.tinker.service.store.tables import models, sampling_sessions, sessions

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Session:
    id: str
    display_name: str | None
    seen: float = field(default_factory=time.monotonic)
    timer: asyncio.TimerHandle | None = None


class Sessions:
    """Live sessions.

    Args:
        timeout_s: seconds without a sign of the client after which a session ends.
        on_end: releases what belongs to a session; receives its id, the reason, and whether it has timed out.
    """

    def __init__(
        self, database: Database, timeout_s: float, on_end: Callable[[str, str, bool], Awaitable[None]]
    ) -> None:
        self._database = database
        self._timeout_s = timeout_s
        self._on_end = on_end
        self._live: dict[str, _Session] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Wait for the clients of sessions of an earlier process."""
        live = select(sessions.c.id, sessions.c.display_name).where(sessions.c.state == "live")
        for row in await self._database.read(lambda connection: connection.execute(live).all()):
            self._watch(_Session(*row))

    async def stop(self) -> None:
        """Stop all timers. Sessions stay alive for the next process."""
        for session in self._live.values():
            if session.timer is not None:
                session.timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def create(
        self,
        owner: str,
        tags: Sequence[str],
        user_metadata: Mapping[str, Any] | None,
        sdk_version: str | None,
        project_id: str | None,
        display_name: str | None,
    ) -> str:
        """Store a new session. Returns its id."""
        name, shown = str(uuid.uuid4()), _text(display_name)
        row = {
            "id": name,
            "owner": owner,
            "state": "live",
            "tags": list(tags),
            "created": time.time(),
            "display_name": shown,
        }
        row |= {
            "user_metadata": user_metadata,
            "sdk_version": _text(sdk_version, 255),
            "project_id": _text(project_id, 255),
        }
        await self._database.write(lambda connection: connection.execute(insert(sessions).values(**row)))
        self._watch(_Session(name, shown))
        return name

    def touch(self, session_id: str) -> None:
        """Note a sign of the client.

        Raises:
            SessionOverError: the session is over.
        """
        if session_id not in self._live:
            raise SessionOverError(f"the session {session_id!r} is finished or timed out: create a new one")
        self._live[session_id].seen = time.monotonic()

    def count(self) -> int:
        """Return the number of live sessions."""
        return len(self._live)

    def display_name(self, session_id: str) -> str | None:
        """Return the name that a client has given to a live session."""
        session = self._live.get(session_id)
        return None if session is None else session.display_name

    async def finish(
        self, session_id: str, reason: Mapping[str, Any] | None, message: str, timed_out: bool = False
    ) -> None:
        """End a session. The first reason is kept; a session that is over stays as it is.

        After an error the session is live, until this is called again or it times out.
        """
        session = self._live.pop(session_id, None)
        if session is None:
            return
        if session.timer is not None:
            session.timer.cancel()
        over = {"state": "over", "ended": time.time(), "reason": dict(reason or {})}
        live = (sessions.c.id == session_id) & (sessions.c.state == "live")
        try:
            # First the models: of a server that ends in the middle, the next one still has the session, and the models that are left.
            await self._on_end(session_id, message, timed_out)
            await self._database.write(lambda c: c.execute(update(sessions).where(live).values(**over)))
        except Exception:
            self._watch(session)
            raise

    async def listing(self, owner: str | None, limit: int, offset: int) -> dict[str, Any]:
        """Return the ids of the sessions of an owner, or of all, the latest first."""
        mine = true() if owner is None else sessions.c.owner == owner
        page = select(sessions.c.id).where(mine).order_by(sessions.c.created.desc(), sessions.c.id)
        page = page.limit(limit).offset(offset)
        count = select(func.count()).select_from(sessions).where(mine)

        def work(connection: Connection) -> dict[str, Any]:
            names, total = connection.execute(page).scalars().all(), connection.execute(count).scalar_one()
            return {"sessions": list(names), "cursor": {"offset": offset, "limit": limit, "total_count": total}}

        return await self._database.read(work)

    async def describe(self, session_id: str) -> dict[str, Any]:
        """Return the JSON form of a session."""

        def work(connection: Connection) -> dict[str, Any]:
            row = connection.execute(select(sessions).where(sessions.c.id == session_id)).mappings().one()
            runs = select(models.c.id).where(models.c.session_id == session_id).order_by(models.c.model_seq_id)
            samplers = select(sampling_sessions.c.id).where(sampling_sessions.c.session_id == session_id)
            return {
                "training_run_ids": list(connection.execute(runs).scalars()),
                "sampler_ids": list(connection.execute(samplers.order_by(sampling_sessions.c.created)).scalars()),
                "user_metadata": row["user_metadata"],
                "display_name": row["display_name"],
            }

        return await self._database.read(work)

    def _watch(self, session: _Session) -> None:
        """Add a session, and look at it when it may have timed out."""
        self._live[session.id] = session
        session.timer = asyncio.get_running_loop().call_later(self._timeout_s, self._look, session)

    def _look(self, session: _Session) -> None:
        """End a session without a sign of its client, or look again when it may have timed out."""
        loop, left = asyncio.get_running_loop(), session.seen + self._timeout_s - time.monotonic()
        if left > 0:
            session.timer = loop.call_later(left, self._look, session)
            return
        message = f"the session {session.id} timed out after {self._timeout_s} s without a heartbeat"
        task = loop.create_task(self._time_out(session.id, message))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _time_out(self, session_id: str, message: str) -> None:
        try:
            await self.finish(session_id, {"type": "timed_out"}, message, timed_out=True)
        except Exception:
            logger.exception("the session %s could not be ended", session_id)


def _text(value: Any, length: int = 10_000) -> str | None:
    """Text that every database can store."""
    return None if value is None else str(value).replace("\x00", "").encode(errors="replace").decode()[:length]
