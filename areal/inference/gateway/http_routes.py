"""Routes of the gateway. Each exists below ``/sessions/{session}`` too; elsewhere a header or the API key names the session."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse

from areal.inference.gateway import replies
from areal.inference.gateway.chat_request import ChatRequest, StreamOptions
from areal.inference.gateway.request_error import RequestError
from areal.inference.gateway.session import Session
from areal.inference.gateway.text_request import TextRequest, TokenRequest

if TYPE_CHECKING:
    from areal.inference.gateway.gateway import Gateway

Body = dict[str, Any]
Chunks = Callable[[Body], Iterable[Body]]

_WAITING_SECONDS = 10.0
"""Time between the comments of a stream whose answer is not there yet, so that no client counts it as dead."""
_GONE = 499
"""Status of a reply that nobody reads."""

router = APIRouter()


def create_gateway_app(gateway: Gateway) -> FastAPI:
    """Return the application."""
    app = FastAPI(openapi_url=None)
    app.state.gateway = gateway
    app.include_router(router)
    app.include_router(router, prefix="/sessions/{session}")
    app.add_exception_handler(RequestError, _wrong)
    app.add_exception_handler(RuntimeError, _wrong)
    app.add_exception_handler(RequestValidationError, _wrong)
    return app


async def session_of(request: Request) -> Session:
    """Return the session that a request names."""
    key = request.headers.get("authorization", "").removeprefix("Bearer ")
    named = request.path_params.get("session") or request.headers.get("x-session-id") or key
    request.state.session = session = request.app.state.gateway.find(named)
    session.check_open()
    return session


Named = Annotated[Session, Depends(session_of)]


@router.get("/v1/models", response_model=None)
async def models(request: Request) -> Body:
    """List the names of the model."""
    gateway = request.app.state.gateway
    return replies.models_reply(gateway.models, gateway.max_model_len)


@router.post("/v1/chat/completions", response_model=None)
async def chat(session: Named, body: ChatRequest, request: Request) -> Response:
    """Answer messages."""
    options = body.stream_options or StreamOptions()

    def chunks(reply: Body) -> Iterator[Body]:
        return replies.chat_chunks(reply, with_usage=options.include_usage)

    work = request.app.state.gateway.chat(session, body)
    return await _streamed(request, work, chunks) if body.stream else await _replied(request, work)


@router.post("/v1/completions", response_model=None)
async def completions(session: Named, body: TextRequest, request: Request) -> Response:
    """Continue texts. A stream has one chunk with the whole reply."""
    work = request.app.state.gateway.complete(session, body)
    return await _streamed(request, work, lambda reply: [reply]) if body.stream else await _replied(request, work)


@router.post("/inference/v1/generate", response_model=None)
async def generate(session: Named, body: TokenRequest, request: Request) -> Response:
    """Continue tokens."""
    return await _replied(request, request.app.state.gateway.generate(session, body))


async def _replied(request: Request, work: Coroutine[Any, Any, Body]) -> Response:
    """Return the reply when it is there. A client that leaves ends the work."""
    task = asyncio.ensure_future(work)
    try:
        await _first(request, task, None)
        return JSONResponse(task.result()) if task.done() else Response(status_code=_GONE)
    finally:
        task.cancel()


async def _streamed(request: Request, work: Coroutine[Any, Any, Body], chunks: Chunks) -> Response:
    """Return server-sent events: comments while the answer is generated, then its chunks. A client that leaves ends the work.

    The status waits for the answer for a time, so that it tells of an error.
    """
    task = asyncio.ensure_future(work)
    try:
        if await _first(request, task, _WAITING_SECONDS):
            if task.done():
                task.result()
            return StreamingResponse(_events(request, task, chunks), media_type="text/event-stream")
        task.cancel()
        return Response(status_code=_GONE)
    except BaseException:
        task.cancel()
        raise


async def _first(request: Request, task: asyncio.Task[Body], seconds: float | None) -> bool:
    """Wait until the work is done, the client has left, or the time is over. Returns False if the client has left."""
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        return task.done() or not gone.done()
    finally:
        gone.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _events(request: Request, task: asyncio.Task[Body], chunks: Chunks) -> AsyncIterator[str]:
    try:
        while not (await asyncio.wait({task}, timeout=_WAITING_SECONDS))[0]:
            yield ": waiting\n\n"
        try:
            sent = list(chunks(task.result()))
        except (RequestError, RuntimeError) as error:
            sent = [_counted(request, error).body()]
        for chunk in sent:
            yield f"data: {json.dumps(chunk)}\n\n"
        yield "data: [DONE]\n\n"
    finally:
        task.cancel()


async def _wrong(request: Request, error: Exception) -> Response:
    counted = _counted(request, error)
    return JSONResponse(counted.body(), counted.status)


def _counted(request: Request, error: Exception) -> RequestError:
    """Return an error as the program reads it, and count it."""
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"][1:])
        error = RequestError(400, "invalid_request", f"{field}: {first['msg']}", field)
    elif not isinstance(error, RequestError):
        # Of a rollout that cannot generate, such as one that was closed.
        error = RequestError(503, "rollout_failed", str(error))
    request.app.state.gateway.count(error, getattr(request.state, "session", None))
    return error
