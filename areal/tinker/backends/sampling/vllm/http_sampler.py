"""Sampling on a running vLLM server. Entry point ``vllm`` of the group ``areal.tinker_samplers``."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import shutil
import tempfile
import time
from collections.abc import Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from transformers import AutoConfig

from areal.inference.http.server_connection import RejectedCall, StatusError, Unavailable
from areal.inference.http.servers.base_schemas import Anything, ReplyBody
from areal.inference.http.servers.call import HTTPCall
from areal.inference.http.servers.vllm_schemas import VLLMChoice, VLLMLoadAdapter, VLLMUnloadAdapter
from areal.inference.protocol import Sampling
from areal.tinker.backends.backend import ModelLimits, SamplingFactory
from areal.tinker.backends.errors import ServerError, UserError
from areal.tinker.backends.prepared import SamplingRequest, SamplingResult
from areal.tinker.backends.sampling.sampler_config import (
    VLLMSamplerConfig,
    checked_sampling,
    gather_or_cancel,
    with_seeds,
)
from areal.tinker.backends.sampling.vllm.completions import (
    MIN_TEMPERATURE,
    check_supported,
    completion_call,
    read_answer,
    read_prompt,
)
from areal.tinker.backends.sampling.vllm.connection import as_error, connect, copy_adapter, first_contact, reason_of

R = TypeVar("R", bound=ReplyBody)

_HEALTH_SECONDS, _CLOSE_SECONDS = 5.0, 5.0
"""Time limits of a look at the server's health, and of removing adapters at the end."""

_PROBE_TOKENS = 8
"""Tokens of the prompt that checks a new adapter."""

_ADD_FAILED = "add_lora method failed"
"""Part of the server's error if its workers cannot use an adapter."""


@dataclass
class ServedSnapshot:
    """Snapshot on the server.

    Attributes:
        name: name of the model or adapter there.
        folder: copy of the adapter; ``None`` for the base model.
        running: number of requests.
        released: whether it goes when the last request has ended.
    """

    name: str
    folder: Path | None
    running: int = 0
    released: bool = False


class VLLMSampler:
    """Implements :class:`~areal.tinker.backends.backend.SamplingBackend`. Adapters that the server has lost by a restart are loaded again.

    Args:
        settings: address and limits of the server.
        limits: sizes of the model.
        model: directory or hub name of the base model.
        served: name of the base model on the server.
    """

    def __init__(self, settings: VLLMSamplerConfig, limits: ModelLimits, model: str, served: str) -> None:
        self._settings, self._limits, self._model, self._base = settings, limits, model, served
        self._server = connect(settings)
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
        self._alive, self._seen, self._closed = True, time.monotonic(), False

    @classmethod
    def create(cls, model: str, config: Mapping[str, Any]) -> VLLMSampler:
        """Connect to a server, and check that it has the model and returns the log-probs of the distribution that it draws from.

        Args:
            model: directory or hub name of the base model.
            config: fields of :class:`~areal.tinker.backends.sampling.sampler_config.VLLMSamplerConfig`.

        Raises:
            ValueError: a setting is unknown or out of range, the model cannot be read, or the server does not fit.
        """
        settings = VLLMSamplerConfig.checked(config)
        try:
            sizes = AutoConfig.from_pretrained(model).get_text_config()
        except (OSError, ValueError) as error:
            raise ValueError(f"model = {model!r} cannot be read: {error}") from error
        # In another thread: this may be called with or without a running one.
        with ThreadPoolExecutor(1) as pool:
            card = pool.submit(asyncio.run, first_contact(settings, model)).result()
        context = card.max_model_len or sizes.max_position_embeddings
        return cls(settings, ModelLimits(sizes.vocab_size, context, settings.max_rank), model, card.id)

    def limits(self) -> ModelLimits:
        """Return the sizes against which requests are checked."""
        return self._limits

    async def open(self, snapshot: str, folder: Path | None) -> None:
        """Serve the adapter in ``folder``, or the base model for ``None``, under the name ``snapshot``."""
        async with self._opening:
            if self._closed:
                raise ServerError("the server is stopping: try again when it is back")
            if snapshot not in self._served:
                added = ServedSnapshot(self._base, None) if folder is None else await self._add(folder)
                self._served[snapshot] = added

    async def release(self, snapshot: str) -> None:
        """Stop serving a snapshot. The server forgets it after its last running request. Does nothing if it is not served."""
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
        """Return whether the server answered when it was last asked. A state that is old starts another look in the background."""
        if not self._closed and time.monotonic() - self._seen > self._settings.health_seconds:
            with contextlib.suppress(RuntimeError):  # no running loop
                asyncio.get_running_loop()
                self._seen = time.monotonic()
                self._later(self._look())
        return self._alive and not self._closed

    async def close(self) -> None:
        """Remove the adapters from the server, and close the connections. May be called twice."""
        if self._closed:
            return
        self._closed = True
        served, self._served = [*self._served.values()], {}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_SECONDS):
                await asyncio.gather(*(self._drop(each) for each in served), *self._tasks)
        await self._server.close()
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    async def _choice(
        self, served: ServedSnapshot, request: SamplingRequest, sampling: Sampling, *, scored: bool
    ) -> VLLMChoice:
        """Return the server's reply for one answer."""
        call = completion_call(served.name, request, sampling, scored=scored)
        async with self._slots:
            try:
                reply = await self._send(call, self._settings.timeout)
            except StatusError as error:
                # A server that was started again does not have the adapters.
                if error.status != 404 or served.folder is None:
                    raise as_error(error) from error
                await self._load(served)
                try:
                    reply = await self._send(call, self._settings.timeout)
                except StatusError as again:
                    raise as_error(again) from again
        return reply.choices[0]

    async def _add(self, folder: Path) -> ServedSnapshot:
        """Copy an adapter, load it on the server, and check that its log-probs are finite.

        The copy is kept: the server reads it again when it needs the memory, and after a restart.
        """
        number = next(self._numbers)
        served = ServedSnapshot(f"{self._prefix}-{number}", self._folder / str(number))
        probe = SamplingRequest(_probe(self._limits), prompt_logprobs=True)
        call = completion_call(served.name, probe, Sampling(1, stop_token_ids=()), scored=True)
        try:
            await asyncio.to_thread(
                copy_adapter, folder, self._folder / str(number), self._model, self._settings.max_rank
            )
            await self._load(served)
            try:
                await self._send(call, self._settings.open_timeout)  # without a slot: long answers may fill them
            except StatusError as error:
                raise as_error(error) from error
        except (ValueError, OSError) as error:
            await self._drop(served)
            raise UserError(f"the weights cannot be sampled from: {error}") from error
        except BaseException:
            self._later(self._drop(served))
            raise
        return served

    async def _load(self, served: ServedSnapshot) -> None:
        """Load an adapter on the server, unless it is there.

        Raises:
            UserError: the server refuses it.
            ServerError: the server does not load adapters, or failed.
        """
        call = HTTPCall(
            "/v1/load_lora_adapter", VLLMLoadAdapter(lora_name=served.name, lora_path=str(served.folder)), Anything
        )
        try:
            await self._send(call, self._settings.open_timeout)
        except StatusError as error:
            reason = reason_of(error)
            if "already been loaded" in reason:  # by another request
                return
            if isinstance(error, RejectedCall):
                raise UserError(f"the inference server refuses the adapter: {reason}") from error
            raise ServerError(
                f"the inference server cannot load adapters: {reason}. Start it with --enable-lora and "
                f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, and give it access to {self._folder} (setting 'folder')"
            ) from error

    async def _drop(self, served: ServedSnapshot) -> None:
        """Remove an adapter from the server, as far as that is possible, with its copy."""
        if served.folder is None:
            return
        call = HTTPCall("/v1/unload_lora_adapter", VLLMUnloadAdapter(lora_name=served.name), Anything)
        # A server that is dead or was started again does not have it.
        with contextlib.suppress(RuntimeError, ValueError):
            await self._server.send(call, _CLOSE_SECONDS)
        await asyncio.to_thread(shutil.rmtree, served.folder, ignore_errors=True)

    async def _send(self, call: HTTPCall[R], seconds: float) -> R:
        """Send a request, again if the server is unavailable for a short time.

        Raises:
            StatusError: a status below 500.
            ServerError: the server is unavailable, or its reply does not have the documented form.
        """
        end = time.monotonic() + self._settings.retry_seconds
        while True:
            try:
                reply = await self._server.send(call, seconds)
            except Unavailable as error:
                # An adapter of other shapes is an internal error, too.
                if _ADD_FAILED in error.text:
                    raise UserError(f"the inference server refuses the adapter: {reason_of(error)}") from error
                self._alive, self._seen = False, time.monotonic()
                if self._server.backoff_until >= end:
                    raise ServerError(
                        f"the inference server is not available, send the request again: {error}"
                    ) from error
                await asyncio.sleep(max(0.0, self._server.backoff_until - time.monotonic()))
            except StatusError:
                raise
            except RuntimeError as error:
                raise ServerError(f"the inference server's reply cannot be used: {error}") from error
            else:
                self._alive, self._seen = True, time.monotonic()
                return reply

    async def _look(self) -> None:
        """Ask the server for its health."""
        try:
            await self._server.send(HTTPCall.get("/health", Anything), _HEALTH_SECONDS)
            self._alive = True
        except (RuntimeError, ValueError):
            self._alive = False
        self._seen = time.monotonic()

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the background."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


create: SamplingFactory = VLLMSampler.create
"""Entry point."""


def _probe(limits: ModelLimits) -> list[int]:
    return list(range(min(_PROBE_TOKENS, limits.vocab_size, limits.max_tokens - 1)))
