"""Owners of what requests name. An object of another owner is answered as one that does not exist."""

from __future__ import annotations

from collections import OrderedDict

from sqlalchemy import select

from areal.tinker.service.checkpoints import CheckpointRegistry, no_checkpoint
from areal.tinker.service.errors import NotFoundError
from areal.tinker.service.params import is_id
from areal.tinker.service.store.database import Database
from areal.tinker.service.store.files import CheckpointPath
from areal.tinker.service.store.futures import Futures, no_request
from areal.tinker.service.store.tables import sessions
from areal.tinker.service.tenants.caller import Caller

MAX_CACHED = 2**16
"""Most sessions whose owner is kept in memory."""


class Owners:
    """The check of identifiers.

    A session owns the runs, checkpoints and sampling sessions that it creates, whose ids begin with its own. A request belongs to the owner
    of its session, or to its caller.
    """

    def __init__(self, database: Database, futures: Futures, registry: CheckpointRegistry) -> None:
        self._database = database
        self._futures = futures
        self._registry = registry
        self._cache: OrderedDict[str, str] = OrderedDict()

    async def check(self, caller: Caller, what: str, identifier: str) -> str:
        """Return the owner of a session, a run or a sampling session.

        Raises:
            NotFoundError: there is none, or it belongs to another owner.
        """
        known = is_id(identifier) and (what != "session" or ":" not in identifier)
        owner = await self._of_session(identifier.split(":")[0]) if known else None
        if owner is None or not caller.may_use(owner):
            raise NotFoundError(f"there is no {what} {str(identifier)[:200]!r}")
        return owner

    async def check_request(self, caller: Caller, request_id: str) -> None:
        """Check that the result of a request is the caller's.

        Raises:
            NotFoundError: there is no such request, or it belongs to another owner.
        """
        if not is_id(request_id) or not caller.may_use(await self._futures.owner(request_id)):
            raise no_request(request_id)

    async def check_checkpoint(self, caller: Caller, path: CheckpointPath, *, reads: bool = False) -> None:
        """Check that a caller may change a checkpoint, or read it: a public one is read by all.

        Raises:
            NotFoundError: there is no such checkpoint, or it is of another owner.
        """
        try:
            await self.check(caller, "training run", path.run_id)
        except NotFoundError:
            if not (reads and await self._registry.is_public(path)):
                raise no_checkpoint(path) from None

    async def _of_session(self, session_id: str) -> str | None:
        if session_id not in self._cache:
            chosen = select(sessions.c.owner).where(sessions.c.id == session_id)
            owner = await self._database.read(lambda connection: connection.execute(chosen).scalar())
            if owner is None:
                return None
            # The owner of a session never changes.
            self._cache[session_id] = owner
            if len(self._cache) > MAX_CACHED:
                self._cache.popitem(last=False)
        return self._cache[session_id]
