"""Rollout engine in this process: generation on a replica of the model, with transformers' continuous batching."""

from __future__ import annotations

import asyncio
import collections.abc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Self

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from areal.api.weights import NamedTensor
from areal.engine.model.media import media_tokens
from areal.inference.local.adapter_router import AdapterRouter
from areal.inference.local.continuous_batching import GenerationLimits, cache_bytes, forget_prefixes
from areal.inference.local.image_router import ImageRouter
from areal.inference.local.prompt_images import ImageReader, PromptImages
from areal.inference.local.prompt_logprobs import PromptLogprobs, PromptScorer
from areal.inference.local.running_requests import PendingAnswer, RunningRequests
from areal.inference.local.sampler import Request, end_tokens
from areal.inference.local.served_adapters import ServedAdapter, ServedAdapters
from areal.inference.protocol import Completion, Sampling
from areal.inference.stop_strings import StopStrings
from areal.utils import platform
from areal.utils.data.image_prompt import Prompt, prompt_tokens
from areal.utils.offload import HostMemory, make_resizable
from areal.weight_sync.apply import load_named

_CLOSED = "the rollout was closed: make another one"
_ASLEEP = "the rollout is asleep: call wake() first"


class LocalRollout:
    """Rollout engine on a replica of the model in this process.

    One thread generates all running answers together, also those of different adapters. It sleeps while there are none. ``generate`` may be
    awaited on any number of event loops. The answer to a request does not depend on concurrent requests, except through the rounding of
    logits.

    Requests with the same prompt and adapter share its keys and values: the first request runs alone until it has a token, and the others
    start then. Nothing is shared across an update. An answer that is running during an update keeps the keys and values of the older
    weights. Its later tokens carry the new version, and their log-probs are of the distribution that they were drawn from. A request that
    draws the token of an image fails.

    Args:
        model: replica in evaluation mode, with ``sdpa`` or flash attention. Its weights must not be used elsewhere. Of its
            ``generation_config``, only ``eos_token_id`` is used.
        max_context: maximum number of tokens of a prompt with its answer.
        version: version of the weights in the model.
        max_requests: maximum number of answers generated at once; others wait.
        cache_tokens: capacity of the cache of keys and values, in tokens. Default: enough for ``max_requests`` of ``max_context``. With a
            smaller cache some answers are paused when it is full, and continue later with the same result.
        page_size: tokens per cache page, the unit of sharing.
        max_batch_tokens: maximum number of tokens of one forward. Use few on a CPU, where ``sdpa`` attends over all sequences of a forward.
        seed: seed of the seeds of requests without one, in order of arrival. ``None`` uses the system's entropy.
        tokenizer: tokenizer of the model, for requests with stop strings.
        batch_invariant: compute on a CPU with the bits of an FSDP engine with this option, in any batch; see docs/batch-invariance.md.

    Raises:
        ValueError: a number is out of range, or the model's attention is not supported, or not with ``batch_invariant``.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_context: int,
        version: int = 0,
        max_requests: int = 64,
        cache_tokens: int | None = None,
        page_size: int = 16,
        max_batch_tokens: int = 256,
        seed: int | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        batch_invariant: bool = False,
    ) -> None:
        if cache_tokens is None:
            cache_tokens = -(-max_context // page_size) * page_size * max_requests
        self._limits = GenerationLimits(
            max_context, max_requests, cache_tokens, page_size, max_batch_tokens, batch_invariant
        )
        self._limits.prepare(model)
        self.model, self.max_context = model, max_context
        self._vocab = model.config.get_text_config().vocab_size
        self._end_tokens, self._tokenizer = end_tokens(model), tokenizer
        self._adapters, self._router, self._images = ServedAdapters(model), AdapterRouter(model), ImageReader(model)
        routers = (self._router, ImageRouter(model))
        self._requests = RunningRequests(self._adapters, page_size, version, routers, media_tokens(model.config, None))
        self._sampler, self._lock = self._requests.sampler, self._requests.lock
        self._seeds = np.random.default_rng(seed)
        self._updating = threading.RLock()  # held by update, sleep, wake and close
        self._failed = self._asleep = False
        self._broken: str | None = None
        self._scorer = PromptScorer(model, self._router, max_batch_tokens, self._scoring)
        self._memory = HostMemory({"params": self._tensors})
        self._start()

    def _start(self) -> None:
        """Start generation with an empty cache."""
        self._manager = self._limits.manager(
            self.model, self._sampler, self._router, self._requests.finish, self._on_end
        )
        self._requests.manager = self._manager
        self._manager.start()

    def _stop(self) -> None:
        """Stop generation, and free the cache."""
        self._manager.stop(hard_stop=True)
        self._router.clear()

    @property
    def version(self) -> int:
        """Version of the weights that generate now."""
        return self._sampler.version

    @property
    def serving(self) -> bool:
        """True if the next request can be served. Does not block."""
        if self._requests.closed or self._asleep or self._failed or self._broken is not None:
            return False
        return self._manager.is_running() and self._manager.background_thread_status.can_accept_new_requests() is None

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters that requests can use."""
        with self._lock:
            return self._adapters.names

    def add_adapter(self, name: str, folder: str | Path) -> None:
        """Read an adapter in peft's format, which requests can name from now on. Running requests are not interrupted.

        Raises:
            ValueError: the name is taken, or the folder is damaged or of another model.
            RuntimeError: the engine is closed or asleep, or generation failed.
        """
        with self._lock:
            self._check_serving()
        adapter = self._adapters.read(Path(folder))
        with self._lock:
            self._check_serving()
            self._adapters.add(name, adapter)

    def remove_adapter(self, name: str) -> None:
        """Remove an adapter. Its running requests continue with it, and its memory is freed after them.

        Raises:
            ValueError: there is no such adapter.
        """
        with self._lock:
            self._adapters.remove(name)

    async def generate(self, prompt_ids: Prompt, sampling: Sampling, adapter: str | None = None) -> Completion:
        """Generate an answer to a prompt. Cancelling the task ends the request at the next step.

        Args:
            prompt_ids: token ids of the prompt, at least one; with images of Qwen2-VL and its successors as an
                :class:`~areal.utils.data.image_prompt.ImagePrompt`.
            sampling: sampling parameters.
            adapter: name of an adapter; ``None`` for the model itself.

        Raises:
            ValueError: the prompt is empty, has an unknown token, or exceeds ``max_context`` together with ``max_new_tokens``; the request
                has stop strings, and the engine no tokenizer; there is no such adapter; or its images do not match its tokens, or the model.
            RuntimeError: the engine is closed or asleep, or generation failed; names the cause.
        """
        tokens = self._check_prompt(prompt_tokens(prompt_ids), sampling)
        name, pending = self._submit(tokens, self._images.read(prompt_ids), sampling, adapter)
        try:
            return await asyncio.wrap_future(pending.future)
        except asyncio.CancelledError:
            self._requests.cancel(name)
            raise

    async def prompt_logprobs(
        self, prompt_ids: collections.abc.Sequence[int], sampling: Sampling, adapter: str | None = None
    ) -> PromptLogprobs:
        """Return the log-probs of a prompt's tokens, under the distribution from which ``sampling`` draws.

        Generation is paused meanwhile. Prompts that wait at the same time are computed together. Errors are those of :meth:`generate`.
        """
        prompt = self._limits.checked(prompt_ids, 0, self._vocab)

        with self._using(adapter) as used:
            return await asyncio.wrap_future(self._scorer.submit(prompt, sampling, used))

    def update(self, tensors: Iterator[NamedTensor], version: int, *, complete: bool = True) -> None:
        """Copy new weights into the model. Generation is paused while the iterator runs.

        Later tokens carry the new version. The iterator is always exhausted, because it may be collective.

        Args:
            tensors: full tensors under Hugging Face names.
            version: version of these weights.
            complete: raise if a weight of the model is missing. False keeps the others, such as for the weights of an adapter.

        Raises:
            ValueError: the tensors do not fit the model. If none was copied yet, the old weights stay in use. Otherwise running requests
                fail, and generation is refused until a complete update succeeds.
            RuntimeError: the engine is closed or asleep, or generation failed. The old weights stay in use.
        """
        copied = 0

        def counted() -> Iterator[NamedTensor]:
            nonlocal copied
            for named in tensors:
                yield named
                copied += 1  # counted once the next one is requested: this one was copied then

        try:
            with self._updating, self._paused():
                try:
                    load_named(self.model, counted(), complete=complete)
                    # Under the pause: no token may see the new weights with the old version or old shared prefixes.
                    self._forget_prefixes()
                except BaseException as error:
                    if copied:
                        self._break(f"an update to version {version} ended half-way ({error})")
                    raise
                self._sampler.version = version
                self._broken = None
        finally:
            for _ in tensors:
                pass

    @property
    def awake_bytes(self) -> int:
        """Bytes of weights and cache on the device while it is awake. Raises a ``RuntimeError`` while it is asleep."""
        return self._memory.report(self.model.device).params.total + cache_bytes(self._manager)

    @property
    def asleep(self) -> bool:
        """True between :meth:`sleep` and :meth:`wake`."""
        return self._asleep

    def sleep(self) -> None:
        """Drop the cache, and move the weights to host memory. Requests and updates raise until :meth:`wake`. May be called twice.

        Raises:
            RuntimeError: answers are running; or the engine is closed, or generation failed.
        """
        with self._updating:
            with self._lock:
                if self._asleep and not self._requests.closed:
                    return
                self._check_serving()
                if self._requests:
                    raise RuntimeError(
                        f"{len(self._requests)} answers are running, which would lose their cache: wait for them before sleep()"
                    )
                self._asleep = True
            try:
                self._stop()
            except RuntimeError:  # inside an update of the same thread
                self._asleep = False
                raise
            make_resizable(self._tensors())
            self._memory.offload(params=True, grads=False, optimizer=False)
            platform.empty_cache(self.model.device)

    def wake(self) -> None:
        """Bring the weights back, bit for bit. The cache is empty. May be called twice.

        Raises:
            RuntimeError: the engine is closed.
        """
        with self._updating:
            if self._requests.closed:
                raise RuntimeError(_CLOSED)
            if self._asleep:
                self._memory.onload(params=True, grads=False, optimizer=False)
                self._start()
                with self._lock:
                    self._asleep = False

    def restart(self) -> None:
        """Start generation again after it has failed, with an empty cache and the same adapters. Does nothing while it runs.

        Raises:
            RuntimeError: the engine is closed.
        """
        with self._updating:
            if self._requests.closed:
                raise RuntimeError(_CLOSED)
            if not self._asleep and self._manager.background_thread_status.can_accept_new_requests() is not None:
                self._stop()
                self._start()
                with self._lock:
                    self._failed = False

    def close(self) -> None:
        """End running requests with their tokens so far (``"aborted"``), and release threads and cache. Wakes the model. Repeatable."""
        with self._updating:
            with self._lock:
                first, self._requests.closed = not self._requests.closed, True
            if first and self._asleep:
                self._memory.onload(params=True, grads=False, optimizer=False)
            elif first:
                self._stop()
        # Outside: its thread may wait for the lock.
        self._scorer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_prompt(self, prompt_ids: collections.abc.Sequence[int], sampling: Sampling) -> list[int]:
        """Return the prompt as a list, or raise a ``ValueError``."""
        prompt = self._limits.checked(prompt_ids, sampling.max_new_tokens, self._vocab)
        if sampling.stop and self._tokenizer is None:
            raise ValueError(
                f"Sampling.stop = {sampling.stop}: text needs a tokenizer: make LocalRollout(tokenizer=...), or set stop_token_ids"
            )
        return prompt

    def _tensors(self) -> list[Tensor]:
        """Return the tensors that move when the engine sleeps."""
        return [*self.model.parameters(), *self.model.buffers(), *self._adapters.tensors()]

    @contextmanager
    def _scoring(self) -> Iterator[None]:
        """Context of a forward over prompts."""
        with self._updating, self._paused():
            self._check_whole()
            yield

    @contextmanager
    def _using(self, name: str | None) -> Iterator[ServedAdapter | None]:
        """Context in which an adapter is kept."""
        with self._lock:
            self._check_serving()
            adapter = self._adapters.begin(name)
        try:
            yield adapter
        finally:
            with self._lock:
                self._adapters.end(adapter)

    def _submit(
        self, prompt: list[int], images: PromptImages | None, sampling: Sampling, adapter: str | None
    ) -> tuple[str, PendingAnswer]:
        """Start a request with a seed, the model's end tokens and stop strings. Returns its name."""
        with self._lock:
            self._check_serving()
            self._check_whole()
            seed = int(self._seeds.integers(2**63)) if sampling.seed is None else sampling.seed
            if sampling.stop_token_ids is None:
                sampling = replace(sampling, stop_token_ids=self._end_tokens)
            stop = StopStrings(self._tokenizer, sampling.stop) if sampling.stop and self._tokenizer else None
            return self._requests.add(prompt, images, Request(sampling, seed, stop=stop), adapter)

    def _check_serving(self) -> None:
        """Raise a ``RuntimeError`` if the engine is closed or asleep, or generation failed."""
        if self._requests.closed or self._asleep:
            raise RuntimeError(_CLOSED if self._requests.closed else _ASLEEP)
        if self._failed or not self._manager.is_running():
            cause = self._manager.background_thread_status.fatal_error
            raise RuntimeError(f"generation has failed: {self._cause()}") from cause

    def _check_whole(self) -> None:
        """Raise a ``RuntimeError`` if an update has ended half-way."""
        if self._broken is not None:
            raise RuntimeError(f"{self._broken}: the weights are mixed. Send a whole update before generating")

    def _cause(self) -> str:
        error = self._manager.background_thread_status.fatal_error
        return "its thread is gone" if error is None else f"{type(error).__name__}: {error}"

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """Pause generation between two forwards."""
        with self._lock:
            self._check_serving()
        with self._manager.pause():
            yield

    def _forget_prefixes(self) -> None:
        """Remove all prompts from the cache, and stop running requests from sharing theirs: older weights computed them, and images."""
        self._images.forget()
        self._sampler.keep_private(forget_prefixes(self._manager))

    def _break(self, why: str) -> None:
        """Fail all requests after an incomplete update: the model has some old and some new weights."""
        with self._lock:
            self._broken = why
        self._requests.fail_all(f"{why}: the weights are mixed")

    def _on_end(self) -> None:
        """Fail the remaining requests at the end of generation."""
        with self._lock:
            # Asleep, no request is left, and the next manager serves those that come.
            self._failed = not self._asleep
        self._requests.end_all(f"generation has failed: {self._cause()}")
