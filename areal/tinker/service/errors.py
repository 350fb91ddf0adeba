"""Errors that the orchestration raises to the HTTP layer, where no future can carry them."""

from __future__ import annotations

from areal.tinker.backends.errors import ServerError, UserError


class NotFoundError(UserError):
    """The named object does not exist, or belongs to another owner: HTTP 404."""


class ConflictError(ValueError):
    """The request contradicts an earlier one. Final: a retry fails again, so that the HTTP layer must not answer 409."""


class BusyError(RuntimeError):
    """A queue is full: HTTP 429. The client tries again later."""


class SessionOverError(RuntimeError):
    """The session is finished or timed out: HTTP 410."""


class DiskFullError(ServerError):
    """The disk has no room for the write: HTTP 503. Deletes make room."""


class LeaseLostError(RuntimeError):
    """Another server owns the database. This server has stopped writing and cannot go on."""
