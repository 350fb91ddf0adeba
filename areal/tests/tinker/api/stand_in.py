"""Stand-in of the service, whose results are simple functions of the requests, and a client of the application on it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
from fastapi import APIRouter

from areal.tinker.api.app import create_app
from areal.tinker.api.http_settings import ApiSettings
from areal.tinker.backends.errors import UserError
from areal.tinker.backends.prepared import PassResult, SampledAnswer, SamplingResult, TopLogprobs
from areal.tinker.service.errors import BusyError, NotFoundError, SessionOverError
from areal.tinker.service.requests import Outcome, Sample, Submitted
from areal.tinker.service.tenants.caller import Caller
from areal.tinker.service.verbs.forward_backward import ForwardBackward
from areal.tinker.service.verbs.models import CreateModel
from areal.tinker.service.verbs.optimizer import OptimStep
from areal.tinker.service.verbs.verb import RefusedRequest

HOSTILE = "<img src=x onerror=alert(1)><script>document.title='owned'</script>"


def pass_result(request: ForwardBackward) -> PassResult:
    """Return log-probs that say which target they belong to."""
    logprobs = []
    for datum in request.data:
        target = datum.loss_fn_inputs["target_tokens"]
        dense = target.values if target.crow_indices is None else np.zeros(target.shape or (), np.int64)
        logprobs.append((-0.5 * dense).astype(np.float32))
    return PassResult(logprobs, {"loss:sum": float(len(logprobs))})


def sampling_result(request: Sample) -> SamplingResult:
    """Return answers that repeat the prompt."""
    prompt = np.concatenate(
        [np.empty(0, np.int64), *(chunk.tokens for chunk in request.prompt if chunk.tokens is not None)]
    )
    logprobs = -np.arange(prompt.size, dtype=np.float32)
    top = TopLogprobs(np.stack([prompt, prompt + 1], 1).astype(np.int32), np.stack([logprobs, logprobs - 1], 1))
    first_missing = np.where(np.arange(prompt.size) == 0, np.float32(np.nan), logprobs)
    answer = SampledAnswer("length", prompt.astype(np.int32), logprobs, top if request.topk_sample_logprobs else None)
    prompt_top = TopLogprobs(top.ids, np.where(np.arange(prompt.size)[:, None] == 0, np.float32(np.nan), top.logprobs))
    return SamplingResult(
        [answer] * request.num_samples,
        first_missing if request.prompt_logprobs else None,
        prompt_top if request.topk_prompt_logprobs else None,
    )


class StandInService:
    """The methods that the HTTP layer calls. ``submitted`` records the requests."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self.submitted: list[Any] = []
        self.outcomes: dict[str, Outcome] = {}
        self.calls: list[tuple[Any, ...]] = []
        self.waits: list[float] = []
        self.is_healthy = True

    def for_caller(self, caller: Caller) -> StandInService:
        return self

    async def create_session(self, tags: list[str], user_metadata: Any, sdk_version: str, **names: Any) -> str:
        self.calls.append(("create_session", tags, user_metadata, sdk_version, names))
        return "session-1"

    async def heartbeat(self, session_id: str) -> None:
        if session_id != "session-1":
            raise SessionOverError(f"session {session_id!r} is over")

    async def finish_session(self, session_id: str, reason: dict[str, Any]) -> None:
        await self.heartbeat(session_id)
        self.calls.append(("finish_session", session_id, reason))

    async def submit(self, request: Any) -> Submitted:
        self.submitted.append(request)
        request_id = f"request-{len(self.submitted)}"
        model_id = getattr(request, "model_id", None)
        ids = None
        kind, result, error = type(request).__name__, {}, None
        if isinstance(request, CreateModel):
            model_id = f"{request.session_id}:train:{request.model_seq_id}"
            result = {"type": "create_model", "model_id": model_id}
        elif isinstance(request, ForwardBackward):
            if not request.data:
                error = "data is empty"
            else:
                result = pass_result(request)
        elif isinstance(request, OptimStep):
            result = {"metrics": {"grad_norm:mean": float("nan"), "lr:mean": request.params.get("learning_rate", 0.0)}}
        elif isinstance(request, RefusedRequest):
            error = request.message
        elif isinstance(request, Sample):
            if request.num_samples > 100:
                raise BusyError("the queue is full")
            ids = tuple(f"{request_id}:{i}" for i in range(request.num_samples))
            result = sampling_result(request)
        if model_id == "missing":
            raise NotFoundError("model 'missing' does not exist")
        state = "done" if error is None else "failed"
        self.outcomes[request_id] = Outcome(
            state, kind, result, error, None if error is None else "user", result_bytes=100
        )
        return Submitted(request_id, model_id, ids)

    async def retrieve(self, request_id: str, timeout_s: float) -> Outcome:
        if request_id == "waits":
            self.waits.append(timeout_s)
            await asyncio.sleep(timeout_s)
            return Outcome("pending", "", queue_state="paused_capacity")
        if request_id == "lost":
            return Outcome("gone", "Sample")
        if request_id not in self.outcomes:
            raise NotFoundError(f"request {request_id!r} does not exist")
        return self.outcomes[request_id]

    async def cancel(self, request_id: str) -> None:
        self.calls.append(("cancel", request_id))

    async def create_sampling_session(
        self, session_id: str, seq_id: int, base_model: Any = None, model_path: Any = None
    ) -> str:
        if model_path and not model_path.startswith("tinker://"):
            raise UserError(f"model_path={model_path!r} must begin with tinker://")
        return f"{session_id}:sample:{seq_id}"

    async def sampler(self, sampling_session_id: str) -> dict[str, Any]:
        return {"sampler_id": sampling_session_id, "base_model": "tiny", "model_path": None}

    async def get_info(self, model_id: str) -> dict[str, Any]:
        return {"model_id": model_id, "model_data": {"model_name": "tiny"}, "is_lora": True, "lora_rank": 8}

    async def weights_info(self, path: str) -> dict[str, Any]:
        return {"base_model": "tiny", "is_lora": True, "lora_rank": 8}

    async def capabilities(self) -> dict[str, Any]:
        return {"supported_models": [{"model_name": "tiny"}]}

    async def training_runs(self, limit: int, offset: int) -> dict[str, Any]:
        return {"training_runs": [], "cursor": {"limit": limit, "offset": offset, "total_count": 0}}

    async def training_run(self, run_id: str) -> dict[str, Any]:
        if run_id == "broken":
            raise RuntimeError("secret of the inside")
        raise NotFoundError(f"run {run_id!r} does not exist")

    async def checkpoints(self, run_id: str) -> dict[str, Any]:
        return {"checkpoints": []}

    async def all_checkpoints(self, limit: int, offset: int) -> dict[str, Any]:
        return {"checkpoints": [], "cursor": {"limit": limit, "offset": offset, "total_count": 0}}

    async def sessions(self, limit: int, offset: int) -> dict[str, Any]:
        return {"sessions": ["session-1"]}

    async def session(self, session_id: str) -> dict[str, Any]:
        return {"training_run_ids": [], "sampler_ids": []}

    async def delete_checkpoint(self, run_id: str, checkpoint_id: str) -> None:
        self.calls.append(("delete_checkpoint", run_id, checkpoint_id))

    async def set_ttl(self, run_id: str, checkpoint_id: str, ttl_seconds: int | None) -> None:
        self.calls.append(("set_ttl", run_id, checkpoint_id, ttl_seconds))

    async def publish(self, run_id: str, checkpoint_id: str) -> None:
        self.calls.append(("publish", run_id, checkpoint_id))

    async def unpublish(self, run_id: str, checkpoint_id: str) -> None:
        self.calls.append(("unpublish", run_id, checkpoint_id))

    async def checkpoint_folder_of(self, run_id: str, checkpoint_id: str) -> Path:
        if self.folder is None or checkpoint_id != "weights/saved":
            raise NotFoundError(f"{checkpoint_id} does not exist")
        return self.folder

    def trouble(self) -> str | None:
        return None if self.is_healthy else "The engine is not healthy."

    async def status(self) -> dict[str, Any]:
        return {
            "healthy": self.is_healthy,
            "base_model": "tiny",
            "sessions": 1,
            "models": [
                {"name": "first run", "model_id": HOSTILE, "owner": "ann", "rank": 8, "queued": 2, "seq_id": 3}
                | {"created": 1e9, "last_request": 1e9}
            ],
            "queue": {"training": 2, "sampling": 1, "pending": 4},
            "losses": {
                HOSTILE: [{"seq_id": seq, "loss": loss, "tokens": 9} for seq, loss in ((1, 4.0), (2, 2.5), (3, 1.25))]
            },
            "checkpoints": [
                {"tinker_path": f"tinker://{HOSTILE}/weights/a", "size_bytes": 12, "time": "2026-01-01T00:00:00Z"}
            ],
            "checkpoint_count": 1,
            "requests": [{"kind": "forward", "result": "refused", "count": 2}],
            "seconds": {"forward": 0.5},
            "tokens": {"training": 900, "sampling": 40},
            "memory": {"used": 3 * 2**30, "free": 5 * 2**30},
        }


@asynccontextmanager
async def client_of(service: Any, *routers: APIRouter, **settings: Any) -> AsyncIterator[httpx2.AsyncClient]:
    """Yield a client of the application with further routes, without a network. Unexpected errors are answered, not raised."""
    app = create_app(service, ApiSettings(**settings))
    for router in routers:
        app.include_router(router)
    transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport, base_url="http://server") as client:
        yield client
