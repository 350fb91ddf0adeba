"""One HTTP request and the type of its reply."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from areal.inference.http.servers.base_schemas import Empty, ReplyBody, RequestBody

R = TypeVar("R", bound=ReplyBody, covariant=True)


@dataclass(frozen=True)
class HTTPCall(Generic[R]):
    """One request: its route, its body, and the type of its reply. The body of a GET request is not sent."""

    route: str
    body: RequestBody
    reply: type[R]
    query: Mapping[str, str] = field(default_factory=dict)
    method: Literal["GET", "POST"] = "POST"

    @classmethod
    def get(cls, route: str, reply: type[R], query: Mapping[str, str] | None = None) -> HTTPCall[R]:
        """Return a GET request."""
        return cls(route, Empty(), reply, query or {}, "GET")


S = TypeVar("S", bound=ReplyBody)


def expect(kind: type[S], reply: Any) -> S:
    """Return ``reply``, checked to be of type ``kind``."""
    if not isinstance(reply, kind):
        raise TypeError(f"a {type(reply).__name__} came where a {kind.__name__} was asked for")
    return reply
