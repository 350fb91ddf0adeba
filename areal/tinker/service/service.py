"""The training server without its HTTP layer: every verb of the protocol as a method."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from areal.tinker.backends.backend import SamplingBackend, TrainingBackend
from areal.tinker.backends.errors import ServerError, UserError
from areal.tinker.service.checkpoints import CheckpointRegistry, check_ttl, checkpoint_of, spec_of
from areal.tinker.service.errors import LeaseLostError, NotFoundError, SessionOverError
from areal.tinker.service.intake import Intake
from areal.tinker.service.order import MAX_LOSS_POINTS
from areal.tinker.service.params import check_integer, check_metadata, check_page, is_id, known_id
from areal.tinker.service.requests import Outcome, Sample, Submitted
from areal.tinker.service.runs import Runs
from areal.tinker.service.sampling import Samplers
from areal.tinker.service.sessions import Sessions
from areal.tinker.service.settings import ServiceSettings
from areal.tinker.service.store.database import Database
from areal.tinker.service.store.files import CheckpointFiles
from areal.tinker.service.store.futures import Futures
from areal.tinker.service.training import Training
from areal.tinker.service.verbs.models import CreateModel
from areal.tinker.service.verbs.verb import ModelRequest

logger = logging.getLogger(__name__)


class Service:
    """One base model on one training backend, for any number of clients. All methods run on one event loop.

    Args:
        training: backend that trains; closed by :meth:`stop`.
        sampling: backend that samples, or ``None``; closed by :meth:`stop`.
        settings: folders, names and limits.
    """

    def __init__(self, training: TrainingBackend, sampling: SamplingBackend | None, settings: ServiceSettings) -> None:
        self._training_backend = training
        self._sampling_backend = sampling
        self._settings = settings
        Path(settings.root).mkdir(parents=True, exist_ok=True)
        self._database = Database(settings.url, settings.lease_s, self._on_lost)
        self._files = CheckpointFiles(settings.root)
        self._futures = Futures(self._database)
        self._registry = CheckpointRegistry(self._database, self._files)
        self._runs = Runs(self._database, settings.owner, self._last_request)
        self._samplers = Samplers(sampling, self._database, self._futures, self._registry, settings)
        self._training = Training(training, self._database, self._futures, self._registry, self._samplers, settings)
        self._sessions = Sessions(self._database, settings.session_timeout_s, self._end_session)
        self._intake = Intake(training, self._training, self._futures, self._runs, self._sessions, settings)
        self._started = 0.0
        self._failed = asyncio.Event()
        self._housekeeping: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        """Open the database, recover from an earlier process, and begin to serve.

        Raises:
            RuntimeError: another server owns the database. Names its host and process.
        """
        await self._database.open()
        try:
            # Unfinished requests of the earlier process fail; folders that no row names are deleted.
            await self._runs.recover()
            await self._registry.start()
            known = await self._registry.known_folders() | await self._samplers.known_folders()
            removed = await asyncio.to_thread(self._files.clean, known)
            if removed:
                logger.info("%d folders of interrupted saves were deleted", len(removed))
            await self._sessions.start()
        except BaseException:
            await self._database.close()
            raise
        self._training.start()
        self._housekeeping = asyncio.get_running_loop().create_task(self._prune())
        self._started = time.time()

    async def stop(self) -> None:
        """Stop serving, and close the backends. Sessions and results stay for the next process."""
        if self._housekeeping is not None:
            self._housekeeping.cancel()
            await asyncio.gather(self._housekeeping, return_exceptions=True)
        await self._sessions.stop()
        self._registry.stop()
        await self._samplers.stop()
        await self._training.stop()
        self._intake.stop()
        await self._database.close()
        # The backends last: nothing calls them now.
        if self._sampling_backend is not None:
            await self._sampling_backend.close()
        await asyncio.to_thread(self._training_backend.close)

    async def failed(self) -> LeaseLostError:
        """Wait until the server cannot go on, and return why: its process must end."""
        await self._failed.wait()
        return self._database.lost or LeaseLostError("the lease is lost")

    def healthy(self) -> bool:
        """Return whether the server owns its database and its backends work."""
        backends = self._training_backend.healthy() and (
            self._sampling_backend is None or self._sampling_backend.healthy()
        )
        return bool(self._started) and self._database.lost is None and self._training.backend_error is None and backends

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
        return await self._sessions.create(tags, user_metadata, sdk_version, project_id, display_name)

    async def heartbeat(self, session_id: str) -> None:
        """Keep a session alive.

        Raises:
            SessionOverError: the session is unknown, finished or timed out.
        """
        self._sessions.touch(session_id)

    async def finish_session(self, session_id: str, reason: Mapping[str, Any] | None = None) -> None:
        """End a session, and release its models and snapshots. The first reason counts.

        Raises:
            SessionOverError: the session is unknown.
        """
        if not is_id(session_id):
            raise SessionOverError(f"the session {session_id!r} is unknown")
        await self._sessions.finish(
            session_id, check_metadata(reason), f"the session {session_id} was finished by its client"
        )

    async def sessions(self, limit: int = 20, offset: int = 0) -> dict[str, Any]:
        """Return ids of sessions, the latest first."""
        return await self._sessions.listing(*check_page(limit, offset))

    async def session(self, session_id: str) -> dict[str, Any]:
        """Return runs and samplers of a session."""
        return await self._sessions.describe(known_id(session_id, "session"))

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
        return await self._futures.retrieve(known_id(request_id, "request"), timeout_s)

    async def cancel(self, request_id: str) -> None:
        """Stop a sampling request. Training requests keep their place in the order."""
        self._samplers.cancel(request_id)

    async def create_sampling_session(
        self, session_id: str, seq_id: int, base_model: str | None = None, model_path: str | None = None
    ) -> str:
        """Create a sampling session of a checkpoint or of the base model. Returns its id.

        Raises:
            UserError: there is no such checkpoint or base model.
        """
        self._check_alive()
        self._sessions.touch(session_id)
        check_integer("sampling_session_seq_id", seq_id, 0)
        return await asyncio.shield(self._create_sampler(session_id, seq_id, base_model, model_path))

    async def sampler(self, sampling_session_id: str) -> dict[str, Any]:
        """Return base model and path of a sampling session."""
        return await self._samplers.describe(known_id(sampling_session_id, "sampling session"))

    # ------------------------------------------------------------------ information

    async def get_info(self, model_id: str) -> dict[str, Any]:
        """Return name, tokenizer and adapter of a model."""
        row = await self._runs.row(known_id(model_id, "model"))
        name = row["base_model"]
        return {
            "type": "get_info",
            "model_id": model_id,
            "model_data": {"arch": None, "model_name": name, "tokenizer_id": self._settings.model_path},
            "model_name": name,
            "is_lora": True,
            "lora_rank": row["rank"],
            "optimizer_config": {"type": row["optimizer"]},
        }

    async def weights_info(self, path: str) -> dict[str, Any]:
        """Return what a client must know to load a checkpoint.

        Raises:
            UserError: the path is malformed, or there is no such checkpoint.
        """
        _, row, _ = await self._registry.find(path)
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
        limits = self._intake.server.limits
        shared = {"max_context_length": limits.max_tokens, "trainable": True, "sampleable": self._samplers.available}
        return {"supported_models": [{"model_name": name, **shared} for name in self._settings.base_models]}

    async def training_runs(self, limit: int = 20, offset: int = 0) -> dict[str, Any]:
        """Return runs, the latest first."""
        return await self._runs.listing(*check_page(limit, offset))

    async def training_run(self, run_id: str) -> dict[str, Any]:
        """Return one run."""
        return await self._runs.describe(known_id(run_id, "training run"))

    async def checkpoints(self, run_id: str) -> dict[str, Any]:
        """Return the checkpoints of a run, the latest first."""
        await self._runs.row(known_id(run_id, "training run"))
        rows, _ = await self._registry.listing(run_id)
        return {"checkpoints": rows}

    async def all_checkpoints(self, limit: int = 100, offset: int = 0) -> dict[str, Any]:
        """Return the checkpoints of all runs, the latest first."""
        limit, offset = check_page(limit, offset)
        rows, total = await self._registry.listing(None, limit, offset)
        return {"checkpoints": rows, "cursor": {"offset": offset, "limit": limit, "total_count": total}}

    # ------------------------------------------------------------------ checkpoints

    async def delete_checkpoint(self, run_id: str, checkpoint_id: str) -> None:
        """Delete a checkpoint. Sampling sessions that have it open go on."""
        self._check_alive()
        await self._registry.delete(run_id, checkpoint_id)

    async def set_ttl(self, run_id: str, checkpoint_id: str, ttl_seconds: int | None) -> None:
        """Let a checkpoint expire, or never for ``None``."""
        self._check_alive()
        expires = None if ttl_seconds is None else time.time() + check_ttl(ttl_seconds)
        await self._registry.change(run_id, checkpoint_id, expires=expires)

    async def publish(self, run_id: str, checkpoint_id: str) -> None:
        """Mark a checkpoint as public."""
        self._check_alive()
        await self._registry.change(run_id, checkpoint_id, public=True)

    async def unpublish(self, run_id: str, checkpoint_id: str) -> None:
        """Mark a checkpoint as private."""
        self._check_alive()
        await self._registry.change(run_id, checkpoint_id, public=False)

    async def checkpoint_folder(self, path: str) -> Path:
        """Return the folder of a checkpoint, for a download.

        Raises:
            UserError: the path is malformed, or there is no such checkpoint.
        """
        return (await self._registry.find(path))[2]

    async def checkpoint_folder_of(self, run_id: str, checkpoint_id: str) -> Path:
        """Return the folder of a checkpoint of a run, such as ``weights/final``.

        Raises:
            NotFoundError: there is no such checkpoint.
        """
        try:
            return (await self._registry.find(str(checkpoint_of(run_id, checkpoint_id))))[2]
        except UserError as error:
            raise NotFoundError(str(error)) from error

    async def status(self) -> dict[str, Any]:
        """Return the state of the server as a JSON value: models, queue, loss curves, checkpoints and counters."""
        runs = await self._runs.listing(50, 0)
        curves = {run["training_run_id"]: await self._curve(run["training_run_id"]) for run in runs["training_runs"]}
        checkpoints, total = await self._registry.listing(None, 50, 0)
        counts = self._training.counts + self._intake.counts + self._samplers.counts
        return {
            "base_model": self._settings.base_models[0],
            "healthy": self.healthy(),
            "started": self._started,
            "sessions": self._sessions.count(),
            "queue": {
                "training": self._training.order.queued(),
                "sampling": self._samplers.queued,
                "pending": self._futures.pending(),
            },
            "models": [model.describe() for model in self._training.order.models.values()],
            "runs": runs["training_runs"],
            "losses": curves,
            "checkpoints": checkpoints,
            "checkpoint_count": total,
            "requests": [{"kind": kind, "result": result, "count": n} for (kind, result), n in sorted(counts.items())],
            "seconds": {**self._training.seconds, "sample": self._samplers.seconds},
        }

    async def _curve(self, run_id: str) -> list[dict[str, Any]]:
        """Loss curve of a run: from memory for a live model."""
        model = self._training.order.models.get(run_id)
        points = list(model.losses) if model else await self._runs.losses(run_id, MAX_LOSS_POINTS)
        return [{"seq_id": seq, "loss": loss, "tokens": tokens} for seq, loss, tokens in points if math.isfinite(loss)]

    async def _accept(self, request: ModelRequest | CreateModel | Sample) -> Submitted:
        if isinstance(request, CreateModel):
            return await self._intake.create(request)
        if isinstance(request, Sample):
            return await self._submit_sample(request)
        known_id(request.model_id, "model")
        return await self._intake.submit(request)

    async def _submit_sample(self, request: Sample) -> Submitted:
        if request.sampling_session_id is not None:
            known_id(request.sampling_session_id, "sampling session")
            if request.seq_id is not None:
                check_integer("seq_id", request.seq_id, 0)
        session_id = await self._samplers.session_of(request)
        if session_id is not None:
            self._sessions.touch(session_id)
        return await self._samplers.submit(request)

    async def _create_sampler(
        self, session_id: str, seq_id: int, base_model: str | None, model_path: str | None
    ) -> str:
        name = await self._samplers.create(session_id, seq_id, base_model, model_path)
        # The session may have ended meanwhile, with all the sampling sessions that it had then.
        try:
            self._sessions.touch(session_id)
        except SessionOverError:
            await self._samplers.end(name)
            raise
        return name

    async def _end_session(self, session_id: str, message: str) -> None:
        """Release what a session owns."""
        mine = [model for model in self._training.order.models.values() if model.session_id == session_id]
        for model in mine:
            await self._training.close_model(model, "released", f"{model.id} was released: {message}", "user")
        await self._samplers.end_all_of(session_id)

    async def _prune(self) -> None:
        """Delete old results and snapshots, a few times in the time for which they are kept."""
        while True:
            await asyncio.sleep(min(self._settings.result_keep_s, self._settings.snapshot_idle_s) / 4)
            try:
                await self._futures.prune(self._settings.result_keep_s)
                await self._samplers.expire(self._settings.snapshot_idle_s)
            except LeaseLostError:
                return
            except Exception:
                logger.exception("old results and snapshots could not be deleted")

    def _last_request(self, model_id: str) -> float | None:
        model = self._training.order.models.get(model_id)
        return None if model is None else model.last_request

    def _on_lost(self, error: LeaseLostError) -> None:
        """Answer those that wait, and run nothing more."""
        self._futures.abandon(str(error))
        self._training.halt()
        self._failed.set()

    def _check_alive(self) -> None:
        """Refuse requests of a server that must not write."""
        if self._database.lost is not None:
            raise ServerError(str(self._database.lost))
