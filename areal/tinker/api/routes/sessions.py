"""Routes of clients and their sessions: configuration, heartbeat, end, listing."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from areal.tinker.api import schemas
from areal.tinker.api.context import Context, Identifier, Limit, Offset, ServiceDependency
from areal.tinker.api.error_replies import BodyError, error_response

session_routes = APIRouter(prefix="/api/v1", tags=["sessions"])

CLIENT_CONFIG = {
    # All clients send training data as compressed protobuf, and create a model from a checkpoint in one request.
    "proto_write_fwdbwd": True,
    "proto_compress_fwdbwd": True,
    "fwd_via_fwdbwd": True,
    "parallel_fwdbwd_chunks": True,
    "create_model_via_load_weights": True,
    # Not offered by this server.
    "pjwt_auth_enabled": False,
    "sample_use_retrieve_futures": False,
    "sample_join_sampling_session": False,
    "custom_loss_server_side": False,
}
"""Flags that clients of all versions read. A custom loss runs in the client."""

DYNAMIC_CONFIG = {"refresh_interval_sec": 300, "sample_cancel_enabled": True, "sample_cancel_max_batch_size": 64}


@session_routes.post("/client/config")
async def client_config(body: schemas.ClientConfigBody) -> dict[str, Any]:
    """Return the flags of a client."""
    return CLIENT_CONFIG


@session_routes.post("/client/dynamic_config")
async def dynamic_config(body: schemas.ClientConfigBody) -> dict[str, Any]:
    """Return the flags that a client reads again from time to time."""
    return DYNAMIC_CONFIG


@session_routes.post("/create_session")
async def create_session(body: schemas.CreateSessionBody, service: ServiceDependency) -> dict[str, Any]:
    """Start a session."""
    metadata = schemas.text_values(body.user_metadata)
    session_id = await service.create_session(
        body.tags, metadata, body.sdk_version, project_id=body.project_id, display_name=body.display_name
    )
    return {"type": "create_session", "session_id": session_id}


@session_routes.post("/session_heartbeat")
async def session_heartbeat(body: schemas.SessionBody, service: ServiceDependency) -> dict[str, Any]:
    """Keep a session alive. A session that is over is answered 410."""
    await service.heartbeat(body.session_id)
    return {"type": "session_heartbeat"}


@session_routes.post("/sessions/{session_id}/finish")
async def finish_session(session_id: Identifier, body: schemas.FinishBody, service: ServiceDependency) -> None:
    """End a session and release its adapters. The first reason is kept."""
    await service.finish_session(session_id, {"type": body.reason.type, "detail": body.detail})


@session_routes.get("/sessions")
async def list_sessions(service: ServiceDependency, limit: Limit = 20, offset: Offset = 0) -> dict[str, Any]:
    """List sessions, the newest first."""
    return await service.sessions(limit, offset)


@session_routes.get("/sessions/{session_id}")
async def get_session(session_id: Identifier, service: ServiceDependency) -> dict[str, Any]:
    """Describe a session."""
    return await service.session(session_id)


@session_routes.get("/sessions/{session_id}/trace_export")
async def trace_export(session_id: Identifier, service: ServiceDependency) -> dict[str, Any]:
    """Answer that there is no trace: this server records none."""
    await service.session(session_id)
    return {"status": "failed", "error": "this server records no traces of sessions"}


@session_routes.get("/get_server_capabilities")
async def get_server_capabilities(service: ServiceDependency) -> dict[str, Any]:
    """Describe the models that this server trains and samples from."""
    return await service.capabilities()


@session_routes.get("/healthz", responses={503: {"description": "The server cannot train, sample or save."}})
async def healthz(context: Context) -> Any:
    """Answer 200 only while the server can train, sample and save."""
    if (trouble := context.service.trouble()) is not None:
        return error_response(503, trouble)
    return {"status": "ok"}


@session_routes.post("/telemetry")
async def telemetry(body: schemas.TelemetryBody) -> dict[str, Any]:
    """Accept and discard a client's events."""
    return {"status": "accepted"}


@session_routes.get("/audit")
async def audit() -> dict[str, Any]:
    """Return an empty log: this server keeps none."""
    return {"entries": []}


@session_routes.get("/billing/usage/events")
@session_routes.get("/billing/usage/checkpoints/current")
async def billing() -> dict[str, Any]:
    """Return no usage: this server bills nothing."""
    return {"data": []}


@session_routes.post("/auth/token")
@session_routes.post("/copy_weights")
@session_routes.post("/create_custom_loss")
@session_routes.post("/join_sampling_session")
@session_routes.post("/retrieve_futures")
@session_routes.post("/sessions/search")
async def not_offered() -> None:
    """Answer 404. The client's configuration says that these are not offered, or the client tolerates the answer."""
    raise BodyError(404, "This server does not offer this route.")


@session_routes.put("/sessions/{session_id}/project")
async def assign_project(session_id: Identifier) -> None:
    """Answer 404: this server has no projects."""
    raise BodyError(404, "This server has no projects.")
