"""The caller of a request, and quotas of an owner."""

from __future__ import annotations

from dataclasses import dataclass


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
