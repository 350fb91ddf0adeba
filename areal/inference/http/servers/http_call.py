"""Requests to inference servers and their replies: the bases of both, and one request with the type of its reply.

A request has exactly the fields of its class. A reply may have more. A field that is missing or of another type is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

TokenId = Annotated[int, Field(ge=0, strict=True)]
LogProb = Annotated[float, Field(allow_inf_nan=False)]


class RequestBody(BaseModel):
    """Body of a request."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ReplyBody(BaseModel):
    """Body of a reply."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class Empty(RequestBody):
    """``{}``, for routes without arguments."""


class Anything(ReplyBody):
    """A reply whose content is not used."""


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


class OpenAPI(ReplyBody):
    """``GET /openapi.json``: the routes that a server offers."""

    paths: dict[str, object]


class ServedCard(ReplyBody):
    """``data[]`` of ``GET /v1/models``. An adapter has the model's name as ``parent``."""

    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class ModelList(ReplyBody):
    """Reply of ``GET /v1/models``."""

    data: list[ServedCard] = Field(min_length=1)


class Tokenize(RequestBody):
    """``POST /tokenize``."""

    prompt: str
    add_special_tokens: Literal[False] = False


class Tokenized(ReplyBody):
    """Reply of ``/tokenize``."""

    tokens: list[TokenId]


class LabelReply(ReplyBody):
    """Label of a server's weights, ``"default"`` after a start."""

    weight_version: str | None = None


class SetLabel(RequestBody):
    """``POST /update_weight_version``."""

    new_version: str


class LabelSpan(ReplyBody):
    """``weight_versions[]``: tokens from ``start``, before ``end``, are of the weights with this label."""

    version: str
    start: int
    end: int
