"""The training server without its HTTP layer: its objects, its start and its end."""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial
from pathlib import Path

from areal.tinker.backends.backend import SamplingBackend, TrainingBackend
from areal.tinker.service.checkpoints import CheckpointRegistry
from areal.tinker.service.errors import LeaseLostError
from areal.tinker.service.intake import Intake
from areal.tinker.service.order import MAX_LOSS_POINTS, LiveModel
from areal.tinker.service.recovery.survivors import find_survivors
from areal.tinker.service.runs import Runs
from areal.tinker.service.sampling import Samplers
from areal.tinker.service.sessions import Sessions
from areal.tinker.service.settings import ServiceSettings
from areal.tinker.service.store.database import Database
from areal.tinker.service.store.files import CheckpointFiles
from areal.tinker.service.store.futures import Futures
from areal.tinker.service.tenants.caller import Caller, QuotaChecks
from areal.tinker.service.tenants.caller_service import CallerService, ServiceParts
from areal.tinker.service.tenants.owners import Owners
from areal.tinker.service.training import Training

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
        self._files = CheckpointFiles(settings.root)
        self._parts = self._create_parts()
        self._database = self._parts.database
        self._started = 0.0
        self._failed = asyncio.Event()
        self._housekeeping: asyncio.Task[None] | None = None

    def _create_parts(self) -> ServiceParts:
        settings, backend = self._settings, self._training_backend
        quotas = QuotaChecks(settings.quotas)
        database = Database(settings.url, settings.lease_s, self._on_lost, settings.disk_reserve_mib * 2**20)
        futures = Futures(database)
        registry = CheckpointRegistry(database, self._files, quotas)
        runs = Runs(database, settings.owner, self._last_request)
        samplers = Samplers(self._sampling_backend, database, futures, registry, settings)
        training = Training(backend, database, futures, registry, samplers, settings)
        sessions = Sessions(database, settings.session_timeout_s, self._end_session)
        return ServiceParts(
            settings=settings,
            database=database,
            owners=Owners(database, futures, registry),
            sessions=sessions,
            futures=futures,
            registry=registry,
            runs=runs,
            samplers=samplers,
            training=training,
            intake=Intake(training, futures, runs, sessions, quotas),
            trouble=self.trouble,
        )

    def for_caller(self, caller: Caller) -> CallerService:
        """Return the verbs of the protocol as one caller may use them."""
        return CallerService(self._parts, caller)

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        """Open the database, recover from an earlier process, and begin to serve.

        Raises:
            RuntimeError: another server owns the database. Names its host and process.
        """
        await self._database.open()
        try:
            # Models of the earlier process go on with their unfinished requests; folders that no row names are deleted.
            survivors, reasons = await find_survivors(self._database, self._settings.recovery)
            await self._parts.runs.recover([each.model.id for each in survivors], reasons)
            await self._parts.registry.start()
            known = await self._parts.registry.known_folders() | await self._parts.samplers.known_folders()
            known |= {
                self._files.live(each.model.id, each.model.stored_uid) for each in survivors if each.model.stored_uid
            }
            removed = await asyncio.to_thread(self._files.clean, known)
            if removed:
                logger.info("%d folders of interrupted saves were deleted", len(removed))
            await self._parts.sessions.start()
            for each in survivors:
                each.model.losses.extend(await self._parts.runs.read_losses(each.model.id, MAX_LOSS_POINTS))
                await self._parts.intake.resume(each.model, each.entries)
        except BaseException:
            await self._database.close()
            raise
        self._parts.training.start()
        self._housekeeping = asyncio.get_running_loop().create_task(self._prune())
        self._started = time.time()

    async def stop(self) -> None:
        """Stop serving, and close the backends. Sessions and results stay for the next process."""
        if self._housekeeping is not None:
            self._housekeeping.cancel()
            await asyncio.gather(self._housekeeping, return_exceptions=True)
        await self._parts.sessions.stop()
        self._parts.registry.stop()
        await self._parts.samplers.stop()
        await self._parts.training.stop()
        self._parts.intake.stop()
        await self._database.close()
        # The backends last: nothing calls them now.
        if self._sampling_backend is not None:
            await self._sampling_backend.close()
        await asyncio.to_thread(self._training_backend.close)

    async def failed(self) -> LeaseLostError:
        """Wait until the server cannot go on, and return why: its process must end."""
        await self._failed.wait()
        return self._database.lost or LeaseLostError("the lease is lost")

    def trouble(self) -> str | None:
        """Return why the server cannot do all that it should, or ``None``."""
        if not self._started or self._database.lost is not None:
            return "The server has no database."
        if self._database.full:
            return "The disk is full: nothing is saved until checkpoints are deleted or it has room."
        backends = self._training_backend, self._sampling_backend
        if self._parts.training.backend_error is not None or not all(
            each is None or each.healthy() for each in backends
        ):
            return "The engine is not healthy."
        return None

    async def _end_session(self, session_id: str, message: str, timed_out: bool) -> None:
        """Release what a session owns, also if a part of it cannot be released. The models of one that has timed out are saved."""
        mine = [model for model in self._parts.training.order.models.values() if model.session_id == session_id]
        errors: list[Exception] = []
        for release in (
            *(partial(self._release_model, model, message, timed_out) for model in mine),
            partial(self._parts.samplers.end_all_of, session_id),
        ):
            try:
                await release()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    async def _release_model(self, model: LiveModel, message: str, timed_out: bool) -> None:
        training = self._parts.training
        saved = await training.save_timed_out(model) if timed_out else None
        reason = f"{model.id} was released: {message}" + (f"; create a model from {saved}" if saved else "")
        await training.close_model(model, "released", reason, "user")

    async def _prune(self) -> None:
        """Delete old results and snapshots, a few times in the time for which they are kept."""
        settings, parts = self._settings, self._parts
        while True:
            await asyncio.sleep(min(settings.result_keep_s, settings.snapshot_idle_s) / 4)
            try:
                await parts.futures.prune(settings.result_keep_s)
                await parts.samplers.expire(settings.snapshot_idle_s)
            except LeaseLostError:
                return
            except Exception:
                logger.exception("old results and snapshots could not be deleted")

    def _last_request(self, model_id: str) -> float | None:
        model = self._parts.training.order.models.get(model_id)
        return None if model is None else model.last_request

    def _on_lost(self, error: LeaseLostError) -> None:
        """Answer those that wait, and run nothing more."""
        self._parts.futures.abandon(str(error))
        self._parts.training.halt()
        self._failed.set()
