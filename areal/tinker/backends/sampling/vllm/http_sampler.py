"""Sampling on running vLLM servers. Entry point ``vllm`` of the group ``areal.tinker_samplers``."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import shutil
import tempfile
import time
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from areal.inference.http.server_connection import StatusError
from areal.inference.http.servers.vllm_schemas import VLLMChoice
from areal.inference.protocol import Sampling
from areal.inference.together import gather_or_cancel
from areal.tinker.backends.backend import ModelLimits, SamplingFactory
from areal.tinker.backends.errors import ServerError, UserError
from areal.tinker.backends.prepared import SamplingRequest, SamplingResult
from areal.tinker.backends.sampling.sampler_config import (
    VLLMSamplerConfig,
    checked_sampling,
    with_seeds,
)
from areal.tinker.backends.sampling.vllm.completions import (
    MIN_TEMPERATURE,
    check_supported,
    completion_call,
    read_answer,
    read_prompt,
)
from areal.tinker.backends.sampling.vllm.connection import as_error, copy_adapter, first_contact
from areal.tinker.backends.sampling.vllm.replica import NotAvailableError, ServedSnapshot, VLLMReplica

_CLOSE_SECONDS = 5.0
"""Time limit of removing adapters at the end."""

_PROBE_TOKENS = 8
"""Tokens of the prompt that checks a new adapter."""


class VLLMSampler:
    """Implements :class:`~areal.tinker.backends.backend.SamplingBackend`. A request goes to the server with the fewest, and to
    another one if that is not available. Adapters that a server has lost by a restart are loaded again.

    Args:
        settings: addresses and limits of the servers.
        limits: sizes of the model.
        model: directory or hub name of the base model.
        served: name of the base model on each server.
    """

    def __init__(self, settings: VLLMSamplerConfig, limits: ModelLimits, model: str, served: Sequence[str]) -> None:
        self._settings, self._limits, self._model = settings, limits, model
        self._replicas = [VLLMReplica(settings, url, base) for url, base in zip(settings.url, served, strict=True)]
        if settings.folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="areal-adapters-"))
        else:
            self._folder = Path(settings.folder).resolve() / f"adapters-{secrets.token_hex(8)}"
            self._folder.mkdir(parents=True)
        self._served: dict[str, ServedSnapshot] = {}
        # Other clients of the server must not have adapters of the same name.
        self._prefix, self._numbers = f"areal-{secrets.token_hex(4)}", itertools.count()
        self._opening, self._slots = asyncio.Lock(), asyncio.Semaphore(settings.max_requests)
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    @classmethod
    def create(cls, model: str, config: Mapping[str, Any]) -> VLLMSampler:
        """Connect to the servers, and check that they have the model and return the log-probs of the distribution that they draw from.

        Args:
            model: directory or hub name of the base model.
            config: fields of :class:`~areal.tinker.backends.sampling.sampler_config.VLLMSamplerConfig`.

        Raises:
            ValueError: a setting is unknown or out of range, the model cannot be read, or a server does not fit.
        """
        settings = VLLMSamplerConfig.checked(config)
        try:
            sizes = AutoConfig.from_pretrained(model).get_text_config()
        except (OSError, ValueError) as error:
            raise ValueError(f"model = {model!r} cannot be read: {error}") from error
        # In another thread: this may be called with or without a running one.
        with ThreadPoolExecutor(1) as pool:
            cards = pool.submit(asyncio.run, first_contact(settings, model)).result()
        context = min(card.max_model_len or sizes.max_position_embeddings for card in cards)
        limits = ModelLimits(sizes.vocab_size, context, settings.max_rank)
        return cls(settings, limits, model, [card.id for card in cards])

    def limits(self) -> ModelLimits:
        """Return the sizes against which requests are checked."""
        return self._limits

    async def open(self, snapshot: str, folder: Path | None) -> None:
        """Serve the adapter in ``folder``, or the base model for ``None``, under the name ``snapshot``."""
        async with self._opening:
            if self._closed:
                raise ServerError("the server is stopping: try again when it is back")
            if snapshot not in self._served:
                added = ServedSnapshot(None, None) if folder is None else await self._add(folder)
                self._served[snapshot] = added

    async def release(self, snapshot: str) -> None:
        """Stop serving a snapshot. The servers forget it after its last running request. Does nothing if it is not served."""
        async with self._opening:
            served = self._served.pop(snapshot, None)
            if served is not None:
                served.released = True
                if not served.running:
                    await self._drop(served)

    async def sample(self, snapshot: str, request: SamplingRequest) -> SamplingResult:
        """Return the answers to a request, each from a separate HTTP request. Cancelling the task closes their connections."""
        if snapshot not in self._served:
            raise UserError(f"snapshot {snapshot!r} is not served any more: create another sampling client")
        served = self._served[snapshot]
        try:
            check_supported(request)
            drawn = checked_sampling(request, self._limits, self._settings, MIN_TEMPERATURE)
        except ValueError as error:
            raise UserError(str(error)) from error
        # The first request brings the log-probs of the prompt, too.
        scored = request.prompt_logprobs or request.prompt_top_k > 0
        served.running += 1
        try:
            choices = await gather_or_cancel(
                [
                    self._choice(served, request, sampling, scored=scored and index == 0)
                    for index, sampling in enumerate(with_seeds(drawn, request))
                ]
            )
        finally:
            served.running -= 1
            if served.released and not served.running:
                self._later(self._drop(served))
        vocabulary = self._limits.vocab_size
        try:
            answers = [read_answer(each, request.sample_top_k, vocabulary) for each in choices]
            scores, top = read_prompt(choices[0], request, vocabulary) if scored else (None, None)
        except ValueError as error:
            raise ServerError(
                f"the inference server's reply cannot be used, send the request again: {error}"
            ) from error
        return SamplingResult(answers, scores if request.prompt_logprobs else None, top)

    def healthy(self) -> bool:
        """Return whether a server answered when it was last asked. A state that is old starts another look in the background."""
        for replica in self._replicas:
            if not self._closed and time.monotonic() - replica.seen > self._settings.health_seconds:
                with contextlib.suppress(RuntimeError):  # no running loop
                    asyncio.get_running_loop()
                    replica.seen = time.monotonic()
                    self._later(replica.look())
        return not self._closed and any(replica.alive for replica in self._replicas)

    async def close(self) -> None:
        """Remove the adapters from the servers, and close the connections. May be called twice."""
        if self._closed:
            return
        self._closed = True
        served, self._served = [*self._served.values()], {}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_SECONDS):
                await asyncio.gather(*(self._drop(each) for each in served), *self._tasks)
        await asyncio.gather(*(replica.close() for replica in self._replicas))
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    async def _choice(
        self, served: ServedSnapshot, request: SamplingRequest, sampling: Sampling, *, scored: bool
    ) -> VLLMChoice:
        """Return the reply for one answer, of the first server that is available."""
        end = time.monotonic() + self._settings.retry_seconds
        async with self._slots:
            while True:
                replica, is_last = self._pick()
                replica.running += 1
                try:
                    return await self._ask(replica, served, request, sampling, end if is_last else 0.0, scored=scored)
                except NotAvailableError:
                    if is_last:
                        raise
                finally:
                    replica.running -= 1

    def _pick(self) -> tuple[VLLMReplica, bool]:
        """Return the server for a request, and whether there is no other one to ask after it."""
        now = time.monotonic()
        ready = [replica for replica in self._replicas if replica.ready_at <= now]
        if not ready:
            return min(self._replicas, key=lambda replica: replica.ready_at), True
        return min(ready, key=lambda replica: replica.running), len(ready) == 1

    async def _ask(
        self,
        replica: VLLMReplica,
        served: ServedSnapshot,
        request: SamplingRequest,
        sampling: Sampling,
        until: float,
        *,
        scored: bool,
    ) -> VLLMChoice:
        """Return the reply of one server."""
        call = completion_call(replica.name_of(served), request, sampling, scored=scored)
        try:
            reply = await replica.send(call, self._settings.timeout, until)
        except StatusError as error:
            # A server that was started again does not have the adapters.
            if error.status != 404 or served.folder is None:
                raise as_error(error) from error
            await replica.load(served, until)
            try:
                reply = await replica.send(call, self._settings.timeout, until)
            except StatusError as again:
                raise as_error(again) from again
        return reply.choices[0]

    async def _add(self, folder: Path) -> ServedSnapshot:
        """Copy an adapter, load it on the servers, and check that its log-probs are finite.

        The copy is kept: a server reads it again when it needs the memory, and after a restart.
        """
        number = next(self._numbers)
        served = ServedSnapshot(f"{self._prefix}-{number}", self._folder / str(number))
        try:
            await asyncio.to_thread(
                copy_adapter, folder, self._folder / str(number), self._model, self._settings.max_rank
            )
            await self._load(served)
        except (ValueError, OSError) as error:
            await self._drop(served)
            raise UserError(f"the weights cannot be sampled from: {error}") from error
        except BaseException:
            self._later(self._drop(served))
            raise
        return served

    async def _load(self, served: ServedSnapshot) -> None:
        """Load an adapter on all servers. Those that are not available get it with their first request, unless all are."""
        until = time.monotonic() + self._settings.retry_seconds
        loads = [self._load_on(replica, served, until) for replica in self._replicas]
        faults = [each for each in await asyncio.gather(*loads, return_exceptions=True) if each is not None]
        for fault in faults:
            if not isinstance(fault, NotAvailableError) or len(faults) == len(self._replicas):
                raise fault

    async def _load_on(self, replica: VLLMReplica, served: ServedSnapshot, until: float) -> None:
        """Load an adapter on one server, and ask it for log-probs."""
        await replica.load(served, until)
        probe = SamplingRequest(_probe(self._limits), prompt_logprobs=True)
        call = completion_call(replica.name_of(served), probe, Sampling(1, stop_token_ids=()), scored=True)
        try:
            await replica.send(call, self._settings.open_timeout, until)  # without a slot: long answers may fill them
        except StatusError as error:
            raise as_error(error) from error

    async def _drop(self, served: ServedSnapshot) -> None:
        """Remove an adapter from the servers, as far as that is possible, with its copy."""
        if served.folder is None:
            return
        await asyncio.gather(*(replica.unload(served) for replica in self._replicas))
        await asyncio.to_thread(shutil.rmtree, served.folder, ignore_errors=True)

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the background."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


create: SamplingFactory = VLLMSampler.create
"""Entry point."""


def _probe(limits: ModelLimits) -> list[int]:
    return list(range(min(_PROBE_TOKENS, limits.vocab_size, limits.max_tokens - 1)))
