"""Routes of requests that are queued, to train and to sample, and of their results, which are futures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute

from areal.tinker.api import codec, schemas
from areal.tinker.api.context import ApiContext, Context, Identifier, ServiceDependency, service_of
from areal.tinker.api.error_replies import BodyError, error_response, field_errors
from areal.tinker.api.http_settings import MIB
from areal.tinker.backends.prepared import PassResult, SamplingResult
from areal.tinker.service.requests import Outcome, Submitted
from areal.tinker.service.tenants.caller_service import CallerService
from areal.tinker.service.verbs.forward_backward import Forward, ForwardBackward
from areal.tinker.service.verbs.models import CreateFromCheckpoint, CreateModel, UnloadModel
from areal.tinker.service.verbs.optimizer import OptimStep
from areal.tinker.service.verbs.verb import ModelRequest, RefusedRequest
from areal.tinker.service.verbs.weights import LoadWeights, SaveExternal, SaveForSampler, SaveWeights


class InTurnRoute(APIRoute):
    """A request of a model that has a wrong field fails in its turn. An answer of status 422 would leave a gap, for which later ones wait."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def in_turn(request: Request) -> Response:
            try:
                return await handle(request)
            except RequestValidationError as error:
                refused = codec.refused_request(error.body, field_errors(error.errors()))
                if refused is None:
                    raise
                return JSONResponse(submitted_json(await service_of(request).submit(refused)))

        return in_turn


training_routes = APIRouter(prefix="/api/v1", tags=["training"], route_class=InTurnRoute)
sampling_routes = APIRouter(prefix="/api/v1", tags=["sampling"])
future_routes = APIRouter(prefix="/api/v1", tags=["futures"])

PROTOBUF = "application/x-protobuf"
THREAD_BYTES = 128 * 1024
"""Size from which a body is decoded in a thread. Decoding takes some milliseconds per megabyte."""

LARGE_PATHS = ("/api/v1/forward", "/api/v1/forward_backward")
"""Paths of routes with batches of training data. The bodies of others have a smaller limit."""

INLINE_RESULT_BYTES = MIB
"""Size above which a result is announced to the client before it is sent."""

T = TypeVar("T")


def submitted_json(submitted: Submitted) -> dict[str, Any]:
    """Return the JSON form of a future."""
    answer: dict[str, Any] = {"request_id": submitted.request_id}
    if submitted.model_id is not None:
        answer["model_id"] = submitted.model_id
    if submitted.sample_sequence_ids is not None:
        answer["sample_sequence_ids"] = list(submitted.sample_sequence_ids)
    return answer


async def _decode(function: Callable[..., T], body: bytes, *arguments: Any) -> T:
    if len(body) < THREAD_BYTES:
        return function(body, *arguments)
    return await asyncio.to_thread(function, body, *arguments)


async def submit_in_turn(
    service: CallerService, body: schemas.SequencedBody, verb: type[ModelRequest]
) -> dict[str, Any]:
    """Submit a request of a model, or one that fails in its turn if the body asks for something that is not supported."""
    shared: dict[str, Any] = {
        "model_id": body.model_id,
        "seq_id": body.seq_id or None,
        "digest": codec.body_digest(body),
    }
    if (refusal := body.refusal()) is not None:
        return submitted_json(await service.submit(RefusedRequest(**shared, message=refusal)))
    return submitted_json(await service.submit(verb(**shared, **body.fields())))


def _refuse_unknown(body: schemas.Body) -> None:
    """Raise a BodyError for fields that this server does not support. For requests that have no turn of a model."""
    if (refusal := body.refusal()) is not None:
        raise BodyError(422, refusal)


# ---- models


@training_routes.post("/create_model")
async def create_model(body: schemas.CreateModelBody, service: ServiceDependency) -> dict[str, Any]:
    """Create an adapter of a base model."""
    _refuse_unknown(body)
    request = CreateModel(
        session_id=body.session_id,
        model_seq_id=body.model_seq_id,
        digest=codec.body_digest(body),
        base_model=body.base_model,
        lora_config=body.lora_config,
        optimizer_config=body.optimizer_config,
        user_metadata=schemas.text_values(body.user_metadata),
    )
    return submitted_json(await service.submit(request))


@training_routes.post("/get_info")
async def get_info(body: schemas.ModelBody, service: ServiceDependency) -> dict[str, Any]:
    """Describe a model."""
    return await service.get_info(body.model_id)


@training_routes.post("/unload_model")
async def unload_model(body: schemas.SequencedBody, service: ServiceDependency) -> dict[str, Any]:
    """Release a model's adapter. Its checkpoints stay."""
    return await submit_in_turn(service, body, UnloadModel)


# ---- passes and steps


async def _pass(request: Request, service: CallerService, verb: type[ForwardBackward]) -> dict[str, Any]:
    body = await request.body()
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() == PROTOBUF:
        decoded: ModelRequest = await _decode(codec.forward_backward_from_protobuf, body, verb)
    else:
        decoded = await _decode(codec.pass_from_json, body, verb)
    return submitted_json(await service.submit(decoded))


PASS_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            PROTOBUF: {
                "schema": {"type": "string", "format": "binary", "description": "ForwardBackwardRequest of wire.proto"}
            },
            "application/json": {
                "schema": {"type": "object", "required": ["model_id"], "properties": {"model_id": {"type": "string"}}}
            },
        },
    }
}


@training_routes.post("/forward_backward", openapi_extra=PASS_BODY)
async def forward_backward(request: Request, service: ServiceDependency) -> dict[str, Any]:
    """Compute a loss and add its gradient, or compute the loss only if the message says ``forward_only``."""
    return await _pass(request, service, ForwardBackward)


@training_routes.post("/forward", openapi_extra=PASS_BODY)
async def forward(request: Request, service: ServiceDependency) -> dict[str, Any]:
    """Compute a loss and its log-probs."""
    return await _pass(request, service, Forward)


@training_routes.post("/optim_step")
async def optim_step(body: schemas.OptimStepBody, service: ServiceDependency) -> dict[str, Any]:
    """Apply the gradients of a model."""
    return await submit_in_turn(service, body, OptimStep)


# ---- checkpoints


@training_routes.post("/save_weights")
async def save_weights(body: schemas.SaveWeightsBody, service: ServiceDependency) -> dict[str, Any]:
    """Save an adapter with its optimizer state."""
    return await submit_in_turn(service, body, SaveWeights)


@training_routes.post("/save_weights_for_sampler")
async def save_weights_for_sampler(body: schemas.SaveForSamplerBody, service: ServiceDependency) -> dict[str, Any]:
    """Save an adapter to sample from, under a name or for a new sampling session only."""
    return await submit_in_turn(service, body, SaveForSampler)


@training_routes.post("/save_weights_external")
async def save_weights_external(body: schemas.SaveExternalBody, service: ServiceDependency) -> dict[str, Any]:
    """Save an adapter for download by ``external_weights_urls``."""
    return await submit_in_turn(service, body, SaveExternal)


@training_routes.post("/load_weights")
async def load_weights(body: schemas.LoadWeightsBody, service: ServiceDependency) -> dict[str, Any]:
    """Load a checkpoint into a model (``model_id``), or create a model from it (``session_id`` and ``model_seq_id``)."""
    if body.session_id is None or body.model_seq_id is None:
        return await submit_in_turn(service, body, LoadWeights)
    _refuse_unknown(body)
    request = CreateFromCheckpoint(
        session_id=body.session_id,
        model_seq_id=body.model_seq_id,
        digest=codec.body_digest(body),
        base_model=body.base_model,
        optimizer_config=body.optimizer_config,
        user_metadata=schemas.text_values(body.user_metadata),
        path=body.path,
        optimizer=body.optimizer,
    )
    return submitted_json(await service.submit(request))


# ---- sampling


@sampling_routes.post("/create_sampling_session")
async def create_sampling_session(body: schemas.SamplingSessionBody, service: ServiceDependency) -> dict[str, Any]:
    """Start to sample from the base model, or from a checkpoint."""
    _refuse_unknown(body)
    sampling_session_id = await service.create_sampling_session(
        body.session_id, body.sampling_session_seq_id, base_model=body.base_model, model_path=body.model_path
    )
    return {"type": "create_sampling_session", "sampling_session_id": sampling_session_id}


@sampling_routes.get("/samplers/{sampler_id}")
async def get_sampler(sampler_id: Identifier, service: ServiceDependency) -> dict[str, Any]:
    """Describe a sampling session."""
    return await service.sampler(sampler_id)


@sampling_routes.post("/asample", responses={429: {"description": "The queue is full: try again later."}})
async def asample(body: schemas.SampleBody, service: ServiceDependency) -> dict[str, Any]:
    """Sample answers to a prompt."""
    _refuse_unknown(body)
    try:
        request = codec.sample_from_json(body)
    except ValueError as error:
        raise BodyError(422, str(error)) from None
    return submitted_json(await service.submit(request))


# ---- results


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
    encode = codec.to_protobuf if has_message and accepts_protobuf else codec.to_json
    # A large result is encoded in a thread: other requests go on in the meantime.
    large = outcome.result_bytes > THREAD_BYTES
    content = await asyncio.to_thread(encode, outcome.result) if large else encode(outcome.result)
    return Response(content, media_type=PROTOBUF if encode is codec.to_protobuf else "application/json")


@future_routes.post("/cancel_future")
async def cancel_future(body: schemas.CancelBody, service: ServiceDependency) -> None:
    """Stop a sampling request whose result is no longer wanted."""
    await service.cancel(body.request_id)
