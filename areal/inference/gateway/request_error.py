"""Errors that a program which sent a request reads."""

from __future__ import annotations

from typing import Any


class RequestError(Exception):
    """A request cannot be answered.

    Attributes:
        status: status of the reply.
        reason: short name, under which the gateway counts it.
        param: field of the request, if one is wrong.
    """

    def __init__(self, status: int, reason: str, text: str, param: str | None = None) -> None:
        super().__init__(text)
        self.status, self.reason, self.param = status, reason, param

    def body(self) -> dict[str, Any]:
        """Return the error in the form of OpenAI's interface."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.reason}}


def refused(field: str, value: Any, way_out: str) -> RequestError:
    """Return the error for a field that cannot be honoured."""
    return RequestError(400, "unsupported_value", f"{field} = {value!r}: {way_out}", field)
