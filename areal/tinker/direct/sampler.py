"""Sampling as plain calls."""

from __future__ import annotations

import asyncio
import tarfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from areal.inference.together import gather_or_cancel
from areal.tinker.backends.backend import SamplingBackend
from areal.tinker.backends.errors import ServerError, UserError
from areal.tinker.backends.prepared import SamplingResult
from areal.tinker.service.params import check_sampling
from areal.tinker.service.requests import Sample
from areal.tinker.service.settings import ServiceLimits

BASE = "base"
"""Name of the base model in the sampling backend."""


@dataclass(frozen=True)
class SampleRequest:
    """Requests for samples of the same weights, before validation.

    Attributes:
        model_id: model of the snapshot; empty for the base model.
        snapshot: name of the snapshot, which ``open_folder`` knows.
        samples: prompts with their parameters; at least one. Fields that name weights are not read.
    """

    model_id: str
    snapshot: str
    samples: Sequence[Sample]


SampleOutputs = dict[str, list[SamplingResult] | Exception]


class DirectSampler:
    """Samples of the base model, and of the latest snapshot of each model that was asked for. A request that is refused fails alone.

    Args:
        backend: sampling backend, which :meth:`close` closes.
        open_folder: returns a context with the folder of a snapshot, by its name.

    Attributes:
        snapshots: name of the open snapshot of each model.
    """

    def __init__(self, backend: SamplingBackend, open_folder: Callable[[str], AbstractContextManager[Path]]) -> None:
        self._backend, self._open_folder = backend, open_folder
        self._runner = asyncio.Runner()
        self._opening = asyncio.Lock()
        self.snapshots: dict[str, str] = {}

    def sample(self, requests: Mapping[str, SampleRequest]) -> SampleOutputs:
        """Return the results of the samples of each request, or the error of the request, by the id of the request."""
        return self._runner.run(self._sample(requests))

    def release(self, model_id: str) -> None:
        """Stop serving the snapshot of a model."""
        snapshot = self.snapshots.pop(model_id, None)
        if snapshot is not None:
            self._runner.run(self._backend.release(snapshot))

    def close(self) -> None:
        """Release everything."""
        self._runner.run(self._backend.close())
        self._runner.close()

    async def _sample(self, requests: Mapping[str, SampleRequest]) -> SampleOutputs:
        results = await asyncio.gather(*map(self._answer, requests.values()))
        return dict(zip(requests, results, strict=True))

    async def _answer(self, request: SampleRequest) -> list[SamplingResult] | Exception:
        try:
            if not request.samples:
                raise UserError("num_samples = 0: ask for at least one answer")
            name = await self._open(request)
            checked = [check_sampling(each, self._backend.limits(), ServiceLimits()) for each in request.samples]
            return await gather_or_cancel([self._backend.sample(name, each) for each in checked])
        # The latter are errors of files and archives.
        except (UserError, ServerError, OSError, EOFError, tarfile.TarError) as error:
            return error

    async def _open(self, request: SampleRequest) -> str:
        """Serve a snapshot in place of an earlier one of the model, or the base model. Returns its name."""
        if not request.model_id:
            await self._backend.open(BASE, None)
            return BASE
        # Requests of one call run concurrently.
        async with self._opening:
            before = self.snapshots.get(request.model_id)
            if before != request.snapshot:
                with self._open_folder(request.snapshot) as folder:
                    await self._backend.open(request.snapshot, folder)
                self.snapshots[request.model_id] = request.snapshot
                if before is not None:
                    await self._backend.release(before)
        return request.snapshot
