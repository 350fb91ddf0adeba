"""Errors that the orchestration raises to the HTTP layer, where no future can carry them."""

from __future__ import annotations


class NotFoundError(LookupError):
    """The named object does not exist: HTTP 404."""


class ConflictError(ValueError):
    """The request contradicts an earlier one. Final: a retry fails again, so that the HTTP layer must not answer 409."""


class BusyError(RuntimeError):
    """A queue is full: HTTP 429. The client tries again later."""


class SessionOverError(RuntimeError):
    """The session is unknown, finished or timed out: HTTP 410."""


class LeaseLostError(RuntimeError):
    """Another server owns the database. This server has stopped writing and cannot go on."""
