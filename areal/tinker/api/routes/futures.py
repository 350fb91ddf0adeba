"""Routes of futures: results by long poll, and cancellation."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from areal.tinker.api import encoding, schemas
from areal.tinker.api.context import ApiContext, Context, ServiceDependency
from areal.tinker.api.error_replies import error_response
from areal.tinker.api.http_settings import MIB
from areal.tinker.api.routes.training import PROTOBUF, THREAD_BYTES
from areal.tinker.backends.prepared import PassResult, SamplingResult
from areal.tinker.service.requests import Outcome
from areal.tinker.service.tenants.caller_service import CallerService

future_routes = APIRouter(prefix="/api/v1", tags=["futures"])

INLINE_RESULT_BYTES = MIB
"""Size above which a result is announced to the client before it is sent."""


async def _wait(context: ApiContext, service: CallerService, request_id: str) -> Outcome:
    """Wait for a result as long as a request may be held, or until the server stops."""
    waiting = asyncio.ensure_future(service.retrieve(request_id, timeout_s=context.settings.hold_s))
    stopping = asyncio.ensure_future(context.stopping.wait())
    try:
        await asyncio.wait({waiting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return await waiting if waiting.done() else Outcome(state="pending", kind="")
    finally:
        waiting.cancel()
        stopping.cancel()


@future_routes.post("/retrieve_future", responses={410: {"description": "The result is lost: send the request again."}})
async def retrieve_future(
    body: schemas.RetrieveBody, request: Request, context: Context, service: ServiceDependency
) -> Any:
    """Return the result of a request. Waits for it, and answers ``try_again`` after some time."""
    outcome = await _wait(context, service, body.request_id)
    if outcome.state == "pending":
        return {"type": "try_again", "request_id": body.request_id, "queue_state": outcome.queue_state}
    if outcome.state == "gone":
        return error_response(
            410, outcome.error or "The result was lost with an earlier server: send the request again."
        )
    if outcome.state == "failed":
        # Status 200: the client would repeat the request after most others.
        return {"error": outcome.error or "The request failed.", "category": outcome.category or "unknown"}
    if body.allow_metadata_only and outcome.result_bytes > INLINE_RESULT_BYTES:
        return {"status": "complete_metadata", "response_payload_size": outcome.result_bytes}
    return await _result(outcome, PROTOBUF in request.headers.get("accept", ""))


async def _result(outcome: Outcome, accepts_protobuf: bool) -> Response:
    has_message = isinstance(outcome.result, PassResult | SamplingResult)
    encode = encoding.to_protobuf if has_message and accepts_protobuf else encoding.to_json
    # A large result is encoded in a thread: other requests go on in the meantime.
    large = outcome.result_bytes > THREAD_BYTES
    content = await asyncio.to_thread(encode, outcome.result) if large else encode(outcome.result)
    return Response(content, media_type=PROTOBUF if encode is encoding.to_protobuf else "application/json")


@future_routes.post("/cancel_future")
async def cancel_future(body: schemas.CancelBody, service: ServiceDependency) -> None:
    """Stop a sampling request whose result is no longer wanted."""
    await service.cancel(body.request_id)
