"""HTTP answers to requests that fail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from areal.tinker.backends.errors import ServerError, UserError
from areal.tinker.service.errors import BusyError, ConflictError, NotFoundError, SessionOverError


class BodyError(Exception):
    """A body that cannot be read. ``status`` is the HTTP status of the answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


STATUS: dict[type[Exception], int] = {
    NotFoundError: 404,
    ConflictError: 422,  # the client repeats a request that is answered 409 for minutes
    BusyError: 429,
    SessionOverError: 410,
    UserError: 400,
    ServerError: 503,
}
"""HTTP status of the answer to each error of the service."""


def error_response(status: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """Return the JSON answer to a failed request, with the category that the SDK knows."""
    category = "user" if status < 500 else "server"
    return JSONResponse({"error": message, "detail": message, "category": category}, status, headers)


def field_errors(errors: Sequence[Any]) -> str:
    """Return the places of pydantic's errors. The values are left out: they can be large, and need not be valid JSON."""
    return "; ".join(f"{'.'.join(str(part) for part in entry['loc'])}: {entry['msg']}" for entry in errors[:10])


async def _service_error(request: Request, error: Exception) -> JSONResponse:
    status = next(status for kind, status in STATUS.items() if isinstance(error, kind))
    return error_response(status, str(error), {"Retry-After": "1"} if status in (429, 503) else None)


async def _body_error(request: Request, error: Exception) -> JSONResponse:
    return error_response(getattr(error, "status", 400), str(error))


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, HTTPException):
        raise error
    message = (
        f"{error.detail}: {request.method} {request.url.path}" if error.status_code in (404, 405) else error.detail
    )
    return error_response(error.status_code, message, dict(error.headers or {}))


async def _validation_error(request: Request, error: Exception) -> JSONResponse:
    """Name each wrong field."""
    if not isinstance(error, RequestValidationError):
        raise error
    return error_response(422, field_errors(error.errors()))


def add_error_handlers(app: FastAPI) -> None:
    """Answer the errors that a route may raise. Others reach :class:`~areal.tinker.api.middleware.RequestLog`."""
    for kind in STATUS:
        app.add_exception_handler(kind, _service_error)
    app.add_exception_handler(BodyError, _body_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
