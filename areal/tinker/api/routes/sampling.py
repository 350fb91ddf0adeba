"""Routes that sample."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from areal.tinker.api import decoding, schemas
from areal.tinker.api.context import Identifier, ServiceDependency
from areal.tinker.api.error_replies import BodyError
from areal.tinker.api.routes.training import submitted_json

sampling_routes = APIRouter(prefix="/api/v1", tags=["sampling"])


@sampling_routes.post("/create_sampling_session")
async def create_sampling_session(body: schemas.SamplingSessionBody, service: ServiceDependency) -> dict[str, Any]:
    """Start to sample from the base model, or from a checkpoint."""
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
    if (refusal := body.refusal()) is not None:
        raise BodyError(422, refusal)
    try:
        request = decoding.sample_from_json(body)
    except ValueError as error:
        raise BodyError(422, str(error)) from None
    return submitted_json(await service.submit(request))
