"""The verbs of the protocol for one caller. Each checks the identifiers that it is given, so that a route cannot forget it."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal.tinker.backends.errors import ServerError, UserError
from areal.tinker.service.checkpoints import CheckpointRegistry, check_ttl, checkpoint_of, spec_of
from areal.tinker.service.errors import NotFoundError, SessionOverError
from areal.tinker.service.intake import Intake
from areal.tinker.service.order import MAX_LOSS_POINTS
from areal.tinker.service.params import check_integer, check_metadata, check_page
from areal.tinker.service.requests import Outcome, Sample, Submitted
from areal.tinker.service.runs import Runs
from areal.tinker.service.sampling import Samplers
from areal.tinker.service.sessions import Sessions
from areal.tinker.service.settings import ServiceSettings
from areal.tinker.service.store.database import Database
from areal.tinker.service.store.files import CheckpointPath, parse_path
from areal.tinker.service.store.futures import Futures
from areal.tinker.service.tenants.caller import Caller
from areal.tinker.service.tenants.owners import Owners
from areal.tinker.service.training import Training
from areal.tinker.service.verbs.models import CreateFromCheckpoint, CreateModel
from areal.tinker.service.verbs.verb import ModelRequest, RefusedRequest
from areal.tinker.service.verbs.weights import LoadWeights
from areal.utils.profiling import host_memory


@dataclass(frozen=True, eq=False, kw_only=True)
class ServiceParts:
    """Objects of a service that all its callers use."""

    settings: ServiceSettings
    database: Database
    owners: Owners
    sessions: Sessions
    futures: Futures
    registry: CheckpointRegistry
    runs: Runs
    samplers: Samplers
    training: Training
    intake: Intake
    trouble: Callable[[], str | None]


class CallerService:
    """The service as one caller sees it. Every identifier of another owner raises :class:`NotFoundError`, as an unknown one does."""

    def __init__(self, parts: ServiceParts, caller: Caller) -> None:
        self.parts = parts
        self.caller = caller

    # ------------------------------------------------------------------ sessions

    async def create_session(
        self,
        tags: Sequence[str] = (),
        user_metadata: Mapping[str, Any] | None = None,
        sdk_version: str | None = None,
        project_id: str | None = None,
        display_name: str | None = None,
    ) -> str:
        """Create a session. Returns its id."""
        self._check_alive()
        user_metadata = check_metadata(user_metadata)
        sessions = self.parts.sessions
        return await sessions.create(self.caller.name, tags, user_metadata, sdk_version, project_id, display_name)

    async def heartbeat(self, session_id: str) -> None:
        """Keep a session alive.

        Raises:
            SessionOverError: the session is finished or timed out.
        """
        await self._check("session", session_id)
        self.parts.sessions.touch(session_id)

    async def finish_session(self, session_id: str, reason: Mapping[str, Any] | None = None) -> None:
        """End a session, and release its models and snapshots. The first reason counts."""
        await self._check("session", session_id)
        message = f"the session {session_id} was finished by its client"
        await self.parts.sessions.finish(session_id, check_metadata(reason), message)

    async def sessions(self, limit: int = 20, offset: int = 0) -> dict[str, Any]:
        """Return ids of sessions, the latest first."""
        return await self.parts.sessions.listing(self.caller.listed_owner, *check_page(limit, offset))

    async def session(self, session_id: str) -> dict[str, Any]:
        """Return runs and samplers of a session."""
        await self._check("session", session_id)
        return await self.parts.sessions.describe(session_id)

    # ------------------------------------------------------------------ requests

    async def submit(self, request: ModelRequest | CreateModel | Sample) -> Submitted:
        """Store a request, which is then executed in its order. Returns once it is stored.

        A request that is wrong is stored, too, and its future fails.

        Raises:
            NotFoundError, SessionOverError: what the request belongs to does not exist.
            ConflictError: its number belongs to another request.
            BusyError: a queue is full.
            UserError: its number is not one.
        """
        self._check_alive()
        # A client that disconnects must not leave a request half stored.
        return await asyncio.shield(self._accept(request))

    async def retrieve(self, request_id: str, timeout_s: float) -> Outcome:
        """Return the state of a request, after at most ``timeout_s`` if it is pending.

        Raises:
            NotFoundError: the request is unknown, or its result was delivered and deleted.
        """
        self._check_alive()
        await self.parts.owners.check_request(self.caller, request_id)
        return await self.parts.futures.retrieve(request_id, timeout_s)

    async def cancel(self, request_id: str) -> None:
        """Stop a sampling request. Training requests keep their place in the order."""
        await self.parts.owners.check_request(self.caller, request_id)
        self.parts.samplers.cancel(request_id)

    async def create_sampling_session(
        self, session_id: str, seq_id: int, base_model: str | None = None, model_path: str | None = None
    ) -> str:
        """Create a sampling session of a checkpoint or of the base model. Returns its id.

        Raises:
            NotFoundError: there is no such checkpoint.
            UserError: there is no such base model.
        """
        self._check_alive()
        await self._check("session", session_id)
        if model_path is not None:
            await self._check_read(model_path)
        self.parts.sessions.touch(session_id)
        check_integer("sampling_session_seq_id", seq_id, 0)
        return await asyncio.shield(self._create_sampler(session_id, seq_id, base_model, model_path))

    async def sampler(self, sampling_session_id: str) -> dict[str, Any]:
        """Return base model and path of a sampling session."""
        await self._check("sampling session", sampling_session_id)
        return await self.parts.samplers.describe(sampling_session_id)

    # ------------------------------------------------------------------ information

    async def get_info(self, model_id: str) -> dict[str, Any]:
        """Return name, tokenizer and adapter of a model."""
        await self._check("model", model_id)
        row = await self.parts.runs.row(model_id)
        name = row["base_model"]
        return {
            "type": "get_info",
            "model_id": model_id,
            "model_data": {"arch": None, "model_name": name, "tokenizer_id": self.parts.settings.model_path},
            "model_name": name,
            "is_lora": True,
            "lora_rank": row["rank"],
            "optimizer_config": {"type": row["optimizer"]},
        }

    async def weights_info(self, path: str) -> dict[str, Any]:
        """Return what a client must know to load a checkpoint.

        Raises:
            NotFoundError: there is no such checkpoint.
            UserError: the path is malformed.
        """
        await self._check_read(path)
        _, row, _ = await self.parts.registry.find(path)
        spec = spec_of(row)
        return {
            "base_model": row["base_model"],
            "optimizer_config": {"type": row["optimizer"]},
            "is_lora": True,
            "lora_rank": spec.rank,
            "train_unembed": spec.head,
            "train_mlp": spec.mlp,
            "train_attn": spec.attention,
        }

    async def capabilities(self) -> dict[str, Any]:
        """Return the models that clients may name."""
        limits, sampleable = self.parts.intake.server.limits, self.parts.samplers.available
        shared = {"max_context_length": limits.max_tokens, "trainable": True, "sampleable": sampleable}
        return {"supported_models": [{"model_name": name, **shared} for name in self.parts.settings.base_models]}

    async def training_runs(self, limit: int = 20, offset: int = 0) -> dict[str, Any]:
        """Return runs, the latest first."""
        return await self.parts.runs.listing(self.caller.listed_owner, *check_page(limit, offset))

    async def training_run(self, run_id: str) -> dict[str, Any]:
        """Return one run."""
        await self._check("training run", run_id)
        return await self.parts.runs.describe(run_id)

    async def checkpoints(self, run_id: str) -> dict[str, Any]:
        """Return the checkpoints of a run, the latest first."""
        await self._check("training run", run_id)
        await self.parts.runs.row(run_id)
        rows, _ = await self.parts.registry.listing(run_id=run_id)
        return {"checkpoints": rows}

    async def all_checkpoints(self, limit: int = 100, offset: int = 0) -> dict[str, Any]:
        """Return the checkpoints of all runs of the caller, the latest first."""
        limit, offset = check_page(limit, offset)
        rows, total = await self.parts.registry.listing(owner=self.caller.listed_owner, limit=limit, offset=offset)
        return {"checkpoints": rows, "cursor": {"offset": offset, "limit": limit, "total_count": total}}

    # ------------------------------------------------------------------ checkpoints

    async def delete_checkpoint(self, run_id: str, checkpoint_id: str) -> None:
        """Delete a checkpoint. Sampling sessions that have it open go on."""
        await self.parts.registry.delete(await self._own_checkpoint(run_id, checkpoint_id))

    async def set_ttl(self, run_id: str, checkpoint_id: str, ttl_seconds: int | None) -> None:
        """Let a checkpoint expire, or never for ``None``."""
        path = await self._own_checkpoint(run_id, checkpoint_id)
        expires = None if ttl_seconds is None else time.time() + check_ttl(ttl_seconds)
        await self.parts.registry.change(path, expires=expires)

    async def publish(self, run_id: str, checkpoint_id: str) -> None:
        """Let all callers read a checkpoint."""
        await self.parts.registry.change(await self._own_checkpoint(run_id, checkpoint_id), public=True)

    async def unpublish(self, run_id: str, checkpoint_id: str) -> None:
        """Let only its owner read a checkpoint."""
        await self.parts.registry.change(await self._own_checkpoint(run_id, checkpoint_id), public=False)

    async def checkpoint_folder(self, path: str) -> Path:
        """Return the folder of a checkpoint, for a download.

        Raises:
            NotFoundError: there is no such checkpoint.
            UserError: the path is malformed.
        """
        await self._check_read(path)
        return (await self.parts.registry.find(path))[2]

    async def checkpoint_folder_of(self, run_id: str, checkpoint_id: str) -> Path:
        """Return the folder of a checkpoint of a run, such as ``weights/final``.

        Raises:
            NotFoundError: there is no such checkpoint.
        """
        return await self.checkpoint_folder(str(checkpoint_of(run_id, checkpoint_id)))

    async def status(self) -> dict[str, Any]:
        """Return what the caller may see of the server as a JSON value: models, queue, loss curves, checkpoints and counters."""
        parts, owner = self.parts, self.caller.listed_owner
        runs = await parts.runs.listing(owner, 50, 0)
        curves = {run["training_run_id"]: await self._curve(run["training_run_id"]) for run in runs["training_runs"]}
        checkpoints, total = await parts.registry.listing(owner=owner, limit=50)
        counts = parts.training.counts + parts.intake.counts + parts.samplers.counts
        models = [model for model in parts.training.order.models.values() if self.caller.may_use(model.owner)]
        return {
            "base_model": parts.settings.base_models[0],
            "healthy": parts.trouble() is None,
            "sessions": parts.sessions.count(),
            "queue": {
                "training": parts.training.order.queued(),
                "sampling": parts.samplers.queued,
                "pending": parts.futures.pending(),
            },
            "models": [{"name": parts.sessions.display_name(each.session_id), **each.describe()} for each in models],
            "runs": runs["training_runs"],
            "losses": curves,
            "checkpoints": checkpoints,
            "checkpoint_count": total,
            "requests": [{"kind": kind, "result": result, "count": n} for (kind, result), n in sorted(counts.items())],
            "seconds": {**parts.training.seconds, "sample": parts.samplers.seconds},
            "tokens": {"training": parts.training.tokens, "sampling": parts.samplers.tokens},
            "memory": {"used": host_memory.resident_bytes(), "free": host_memory.available_bytes()},
        }

    # ------------------------------------------------------------------ checks

    async def _check(self, what: str, identifier: str) -> str:
        """Return the owner of an identifier, which is one of the caller's."""
        return await self.parts.owners.check(self.caller, what, identifier)

    async def _check_read(self, path: str) -> None:
        """Check that the caller may read a checkpoint."""
        await self.parts.owners.check_checkpoint(self.caller, parse_path(path), reads=True)

    async def _check_load(self, path: str) -> None:
        """The same for a request that fails in its turn if the path is malformed."""
        try:
            parse_path(path)
        except UserError:
            return
        await self._check_read(path)

    async def _own_checkpoint(self, run_id: str, checkpoint_id: str) -> CheckpointPath:
        """Return the path of a checkpoint that the caller may change."""
        self._check_alive()
        path = checkpoint_of(run_id, checkpoint_id)
        await self.parts.owners.check_checkpoint(self.caller, path)
        return path

    def _check_alive(self) -> None:
        """Refuse requests of a server that must not write."""
        if self.parts.database.lost is not None:
            raise ServerError(str(self.parts.database.lost))

    # ------------------------------------------------------------------ help

    async def _accept(self, request: ModelRequest | CreateModel | Sample) -> Submitted:
        if isinstance(request, Sample):
            return await self._submit_sample(request)
        if isinstance(request, CreateModel):
            owner = await self._check("session", request.session_id)
            if isinstance(request, CreateFromCheckpoint):
                await self._check_load(request.path)
            return await self.parts.intake.create(request, owner)
        owner = await self._check("model", request.model_id)
        if isinstance(request, LoadWeights):
            try:
                await self._check_load(request.path)
            except NotFoundError as error:
                # Without a request of this number, later ones would wait for it.
                if request.seq_id is not None:
                    place = (request.model_id, request.seq_id, request.digest)
                    await self.parts.intake.submit(RefusedRequest(*place, message=str(error)), owner)
                raise
        return await self.parts.intake.submit(request, owner)

    async def _submit_sample(self, request: Sample) -> Submitted:
        owner = self.caller.name
        if request.sampling_session_id is not None:
            owner = await self._check("sampling session", request.sampling_session_id)
            if request.seq_id is not None:
                check_integer("seq_id", request.seq_id, 0)
        elif request.model_path is not None:
            await self._check_read(request.model_path)
        session_id = await self.parts.samplers.session_of(request)
        if session_id is not None:
            self.parts.sessions.touch(session_id)
        return await self.parts.samplers.submit(request, owner)

    async def _create_sampler(
        self, session_id: str, seq_id: int, base_model: str | None, model_path: str | None
    ) -> str:
        name = await self.parts.samplers.create(session_id, seq_id, base_model, model_path)
        # The session may have ended meanwhile, with all the sampling sessions that it had then.
        try:
            self.parts.sessions.touch(session_id)
        except SessionOverError:
            await self.parts.samplers.end(name)
            raise
        return name

    async def _curve(self, run_id: str) -> list[dict[str, Any]]:
        """Loss curve of a run: from memory for a live model."""
        model = self.parts.training.order.models.get(run_id)
        points = list(model.losses) if model else await self.parts.runs.losses(run_id, MAX_LOSS_POINTS)
        return [{"seq_id": seq, "loss": loss, "tokens": tokens} for seq, loss, tokens in points if math.isfinite(loss)]
