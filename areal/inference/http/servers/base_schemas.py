"""Bases of the requests and replies of inference servers.

A request has exactly the fields of its class. A reply may have more. A field that is missing or of another type is an error.
"""

from __future__ import annotations

from typing import Annotated

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


class OpenAPI(ReplyBody):
    """``GET /openapi.json``: the routes that a server offers."""

    paths: dict[str, object]
