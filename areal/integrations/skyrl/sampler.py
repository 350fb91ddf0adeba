"""Samples for SkyRL, which asks for them in one thread, from a sampling backend, which runs on an event loop."""

from __future__ import annotations

import asyncio
import tarfile

from cloudpathlib import AnyPath
from skyrl.tinker import types
from skyrl.utils.storage import download_and_unpack

from areal.integrations.skyrl.model_pass import failed, raw_chunks
from areal.tinker.backends.backend import SamplingBackend
from areal.tinker.backends.errors import ServerError, UserError
from areal.tinker.backends.sampling.sampler_config import gather_or_cancel
from areal.tinker.service.params import check_sampling
from areal.tinker.service.requests import Sample
from areal.tinker.service.settings import ServiceLimits

BASE = "base"
"""Name of the base model in the sampling backend. The name of a snapshot is the path of its archive."""


class ModelSampler:
    """Samples of the base model, and of the latest snapshot of each model that was asked for.

    Args:
        backend: sampling backend, which this object closes.
    """

    def __init__(self, backend: SamplingBackend) -> None:
        self.backend = backend
        self._runner = asyncio.Runner()
        self._opening = asyncio.Lock()
        self._snapshots: dict[str, str] = {}

    def sample(self, batch: types.PreparedSampleBatch) -> dict[str, types.SampleOutput | types.ErrorResponse]:
        """Return the answers of each request, or its error."""
        return self._runner.run(self._sample(batch))

    def release(self, model_id: str) -> None:
        """Stop serving the snapshot of a model."""
        snapshot = self._snapshots.pop(model_id, None)
        if snapshot is not None:
            self._runner.run(self.backend.release(snapshot))

    def close(self) -> None:
        """Release everything."""
        self._runner.run(self.backend.close())
        self._runner.close()

    async def _sample(self, batch: types.PreparedSampleBatch) -> dict[str, types.SampleOutput | types.ErrorResponse]:
        requests = batch.request_batch_slices
        answers = await asyncio.gather(*(self._answer(batch, *request[1:]) for request in requests))
        return {request[0]: answer for request, answer in zip(requests, answers, strict=True)}

    async def _answer(
        self, batch: types.PreparedSampleBatch, model_id: str, start: int, end: int, scored: bool
    ) -> types.SampleOutput | types.ErrorResponse:
        """Return the answers of the request with the samples from ``start`` to ``end``, or its error."""
        try:
            if start == end:
                raise UserError("num_samples = 0: ask for at least one answer")
            snapshot = await self._open(model_id, batch.all_checkpoint_paths[start])
            requests = [_request(batch, i, scored and i == start) for i in range(start, end)]
            checked = [check_sampling(each, self.backend.limits(), ServiceLimits()) for each in requests]
            results = await gather_or_cancel([self.backend.sample(snapshot, each) for each in checked])
        except (UserError, ServerError, OSError, EOFError, tarfile.TarError) as error:
            return failed(error)
        answers = [answer for result in results for answer in result.answers]
        lists = [(answer.stop_reason, answer.tokens.tolist(), answer.logprobs.tolist()) for answer in answers]
        sequences = [types.GeneratedSequence(stop_reason=s, tokens=t, logprobs=l) for s, t, l in lists]
        # As in SkyRL, the first token is left out.
        prompt = results[0].prompt_logprobs
        return types.SampleOutput(sequences=sequences, prompt_logprobs=None if prompt is None else prompt[1:].tolist())

    async def _open(self, model_id: str, path: str) -> str:
        """Serve a snapshot in place of an earlier one of the model, or the base model. Returns its name."""
        if not model_id:
            await self.backend.open(BASE, None)
            return BASE
        # SkyRL asks for one snapshot of a model in a batch.
        async with self._opening:
            before = self._snapshots.get(model_id)
            if before != path:
                with download_and_unpack(AnyPath(path)) as folder:
                    await self.backend.open(path, folder)
                self._snapshots[model_id] = path
                if before is not None:
                    await self.backend.release(before)
        return path


def _request(batch: types.PreparedSampleBatch, i: int, scored: bool) -> Sample:
    """Return the request for one sample, which has its own seed."""
    params = batch.all_sampling_params[i]
    stop = params.stop_strings if params.stop_strings is not None else params.stop_tokens
    names = ("temperature", "max_tokens", "seed", "top_k", "top_p")
    return Sample(
        b"",
        raw_chunks(batch.all_model_inputs[i]),
        sampling_params={**{name: getattr(params, name) for name in names}, "stop": stop},
        prompt_logprobs=scored,
    )
