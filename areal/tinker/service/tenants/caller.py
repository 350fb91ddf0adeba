"""The caller of a request, and quotas of an owner: stored bytes, live adapters and queued tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import Connection, func, select

from areal.tinker.backends.errors import UserError
from areal.tinker.service.errors import BusyError
from areal.tinker.service.store.tables import checkpoints, runs_of, sampling_sessions, sessions


@dataclass(frozen=True)
class Caller:
    """The user whose key a request has.

    Attributes:
        name: owner of the sessions that the caller creates.
        admin: whether the caller may use and list what belongs to other owners.
    """

    name: str
    admin: bool = False

    @property
    def listed_owner(self) -> str | None:
        """Owner whose objects a listing shows; ``None`` for those of all owners."""
        return None if self.admin else self.name

    def may_use(self, owner: str) -> bool:
        """Return whether the objects of an owner exist for this caller."""
        return self.admin or self.name == owner


SERVER = Caller("server", admin=True)
"""The server itself, for requests that need no key."""


@dataclass(frozen=True)
class Quotas:
    """Most that an owner may use. ``None`` is no limit.

    Attributes:
        max_stored_bytes: bytes of checkpoints and snapshots.
        max_adapters: live models.
        max_queued_tokens: tokens of requests that wait or run, with the answers that sampling requests ask for.
    """

    max_stored_bytes: int | None = None
    max_adapters: int | None = None
    max_queued_tokens: int | None = None


NO_QUOTAS = Quotas()


class QuotaChecks:
    """Compares what an owner uses with its quotas.

    A request that can never succeed, and one that the client can only mend by giving something up, is a :class:`UserError`, which the
    client reports. A queue empties: its refusal is a :class:`BusyError`, after which the client tries again for some minutes.
    """

    def __init__(self, quotas: Mapping[str, Quotas]) -> None:
        self._quotas = quotas

    def check_adapters(self, owner: str, live: int) -> None:
        """Refuse a further model."""
        most = self._of(owner).max_adapters
        if most is not None and live >= most:
            raise UserError(
                f"{owner} has {live} live models, and the quota is {most}: end a session or unload a model, which its checkpoints survive"
            )

    def check_tokens(self, owner: str, tokens: int) -> None:
        """Refuse a request that does not fit into an empty queue."""
        most = self._of(owner).max_queued_tokens
        if most is not None and tokens > most:
            raise UserError(
                f"the request has {tokens} tokens, and the quota of {owner} is {most} queued tokens: send smaller requests"
            )

    def check_queue(self, owner: str, queued: int, tokens: int) -> None:
        """Refuse a request that does not fit into the queue now, but will later."""
        most = self._of(owner).max_queued_tokens
        if most is not None and tokens <= most < queued + tokens:
            raise BusyError(
                f"requests of {owner} with {queued} tokens wait or run, and the quota is {most}: try again later"
            )

    def check_stored(self, connection: Connection, owner: str, more: int, replaced: str | None = None) -> None:
        """Refuse ``more`` stored bytes. ``replaced`` is the path of a checkpoint that they replace."""
        most = self._of(owner).max_stored_bytes
        if most is None:
            return
        used = stored_bytes(connection, owner, replaced)
        if used + more > most:
            raise UserError(
                f"{owner} stores {used} bytes, and the quota is {most}: this save needs {more} more; delete checkpoints, or let them expire"
            )

    def _of(self, owner: str) -> Quotas:
        return self._quotas.get(owner, NO_QUOTAS)


def stored_bytes(connection: Connection, owner: str, replaced: str | None = None) -> int:
    """Return the bytes of the checkpoints and snapshots of an owner, without those of the path ``replaced``."""
    named = select(func.sum(checkpoints.c.size_bytes)).where(checkpoints.c.run_id.in_(runs_of(owner)))
    if replaced is not None:
        named = named.where(checkpoints.c.path != replaced)
    mine = select(sessions.c.id).where(sessions.c.owner == owner)
    live = (sampling_sessions.c.state == "live") & sampling_sessions.c.session_id.in_(mine)
    snapshots = select(func.sum(sampling_sessions.c.size_bytes)).where(live)
    return sum(int(connection.execute(chosen).scalar() or 0) for chosen in (named, snapshots))
