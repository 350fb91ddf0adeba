"""Errors of a backend, by who can mend them."""

from __future__ import annotations


class UserError(ValueError):
    """The request is wrong: it fails alone, with the SDK's category ``user``. The message names the field, the value and the way out."""


class ServerError(RuntimeError):
    """The server failed on a valid request, with the SDK's category ``server``. The message says what the client can do."""


class BackendAwayError(ServerError):
    """The backend was lost, and cannot be started again now. What it had is stored: a later request tries again."""


class BackendLostError(ServerError):
    """The backend has lost its models: every adapter is gone until :meth:`TrainingBackend.restart`."""
