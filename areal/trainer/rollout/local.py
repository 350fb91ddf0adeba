"""Generation in this process, on a replica of the model, by transformers' continuous batching."""

from __future__ import annotations

import asyncio
import collections.abc
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import numpy as np
import transformers
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation import ContinuousBatchingConfig, ContinuousBatchingManager
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from areal.api.weights import NamedTensor
from areal.trainer.rollout.protocol import Completion, Sampling
from areal.trainer.rollout.sampler import Request, RequestSampler
from areal.weight_sync.apply import load_named

_POLL = 0.2
"""Seconds after which the collecting thread looks whether generation, and this process's main thread, still run."""

_MARGIN = 0.15
"""Share of the cache beyond what the answers under way need: it keeps prompts for later requests. Below it, they are thrown out."""


@dataclass
class _Pending:
    prompt: tuple[int, ...]
    request: Request
    future: Future[Completion] = field(default_factory=Future)


class LocalRollout:
    """A rollout engine on a replica that lives in this process.

    One thread generates, for all answers under way at once; another hands out what is done. ``generate`` may be awaited on any number
    of event loops. What a request gets does not depend on what runs beside it, but for the rounding of the logits.

    Keys and values of a prompt are computed once for the requests that share it: of those with the same prompt, the first goes ahead
    until it has a token. Nothing is shared across an update. An answer under way goes on across an update with the keys and values
    that older weights computed: its later tokens carry the new version, and their log-probs are those that they were drawn with, not
    what the new weights alone would give.

    Args:
        model: a replica in evaluation mode, alone in the use of its weights, with ``sdpa`` or flash attention. Its ``generation_config``
            is not looked at.
        max_context: most tokens of a prompt and its answer together.
        version: of the weights in the model.
        max_requests: answers that are generated at once; others wait.
        cache_tokens: keys and values that are kept, in tokens; enough for ``max_requests`` of ``max_context`` by default. With less, some
            answers are put back when it is full, and continued later as if nothing had been.
        page_size: tokens that are shared or not, together.
        max_batch_tokens: most tokens of one forward. On a CPU few are better: ``sdpa`` attends over all sequences of a forward.
        seed: of the seeds that requests without one get, in the order in which they arrive; ``None`` takes it from the system.

    Raises:
        ValueError: a number is out of its range, or the model's attention is another.
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
    ) -> None:
        pages = -(-max_context // page_size)
        if cache_tokens is None:
            cache_tokens = pages * page_size * max_requests
        _check_sizes(model, max_context, max_requests, cache_tokens, page_size, max_batch_tokens)
        self.model = model
        self.max_context = max_context
        self._vocab = model.config.get_text_config().vocab_size
        self._page_size = page_size
        self._sampler = RequestSampler(version, self._release)
        self._seeds = np.random.default_rng(seed)
        self._count = 0
        self._pending: dict[str, _Pending] = {}
        self._waiting: dict[
            tuple[int, ...], tuple[str, list[str]]
        ] = {}  # by prompt: who reads it, and who waits for that
        self._lock = threading.Lock()
        self._updating = threading.Lock()
        self._closed = False
        self._failed = False
        self._broken: str | None = None
        self._manager = _manager(
            model,
            ContinuousBatchingConfig(
                page_size=page_size,
                num_blocks=int(cache_tokens / page_size / (1 - _MARGIN)) + 1,
                max_batch_tokens=max_batch_tokens,
                max_requests_per_batch=max_requests,
                safety_margin=_MARGIN,
                use_async_batching=False,
                use_cuda_graph=False,
                auto_switch_to_flash=False,
            ),
            self._sampler,
        )
        self._manager.start()
        self._collector = threading.Thread(target=self._collect, name="rollout-collector")
        self._collector.start()

    @property
    def version(self) -> int:
        """Of the weights that are serving now."""
        return self._sampler.version

    async def generate(self, prompt_ids: collections.abc.Sequence[int], sampling: Sampling) -> Completion:
        """Continue a prompt. A cancelled task frees its place at the next step.

        Raises:
            ValueError: the prompt is empty, has a token that the model does not know, or is with ``max_new_tokens`` longer than
                ``max_context``.
            RuntimeError: the engine was closed before, or generation failed; names the cause.
        """
        name, pending = self._submit(self._checked(prompt_ids, sampling), sampling)
        try:
            return await asyncio.wrap_future(pending.future)
        except asyncio.CancelledError:
            self._drop(name)
            self._manager.cancel_request(name)
            raise

    def update(self, tensors: Iterator[NamedTensor], version: int, *, complete: bool = True) -> None:
        """Take new weights in place: generation stands still for as long as the iterator runs.

        Every token after it carries the new version. The iterator is always read to its end.

        Args:
            complete: these are to be all weights of the model; otherwise the others stay, as with those of an adapter alone.

        Raises:
            ValueError: the tensors are not those of the model. If none was copied yet, the old weights serve on. Otherwise what is under
                way fails, and nothing is generated before a whole update has succeeded.
            RuntimeError: the engine was closed, or generation failed.
        """
        copied = 0

        def counted() -> Iterator[NamedTensor]:
            nonlocal copied
            for named in tensors:
                yield named
                copied += 1  # the next one is asked for

        try:
            with self._updating, self._paused():
                try:
                    load_named(self.model, counted(), complete=complete)
                except BaseException as error:
                    if copied:
                        self._break(f"an update to version {version} ended half-way ({error})")
                    raise
                self._forget_prefixes()
                self._sampler.version = version
                self._broken = None
        finally:
            for _ in tensors:
                pass

    def close(self) -> None:
        """End what is under way with what there is of it (``"aborted"``), and free the threads and the cache. May be called twice."""
        with self._updating:
            with self._lock:
                first, self._closed = not self._closed, True
            if first:
                self._manager.stop(hard_stop=True)
                self._collector.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _checked(self, prompt_ids: collections.abc.Sequence[int], sampling: Sampling) -> list[int]:
        prompt = [int(token) for token in prompt_ids]
        if not prompt:
            raise ValueError("prompt_ids is empty: an answer needs at least one token to go on from")
        unknown = [token for token in prompt if not 0 <= token < self._vocab]
        if unknown:
            raise ValueError(f"prompt_ids has the token {unknown[0]}: the model knows 0 to {self._vocab - 1}")
        if len(prompt) + sampling.max_new_tokens > self.max_context:
            raise ValueError(
                f"{len(prompt)} prompt tokens and max_new_tokens = {sampling.max_new_tokens} are longer than max_context = "
                f"{self.max_context}: shorten one, or make the rollout with more"
            )
        return prompt

    def _submit(self, prompt: list[int], sampling: Sampling) -> tuple[str, _Pending]:
        with self._lock:
            self._check_serving()
            if self._broken is not None:
                raise RuntimeError(f"{self._broken}: the weights are mixed. Send a whole update before generating")
            name = f"request {self._count}"
            self._count += 1
            seed = int(self._seeds.integers(2**63)) if sampling.seed is None else sampling.seed
            pending = self._pending[name] = _Pending(tuple(prompt), Request(sampling, seed))
            self._sampler.add(name, pending.request)
            if pending.prompt in self._waiting:
                self._waiting[pending.prompt][1].append(name)
                return name, pending
            if len(prompt) > self._page_size:  # shorter ones have nothing to share
                self._waiting[pending.prompt] = (name, [])
            self._hand_over(name, pending)
            return name, pending

    def _hand_over(self, name: str, pending: _Pending) -> None:
        """Give a request to the manager. It takes none when it has just failed; then the collecting thread settles the request."""
        sampling = pending.request.sampling
        self._manager.add_request(
            list(pending.prompt),
            request_id=name,
            max_new_tokens=sampling.max_new_tokens,
            eos_token_id=list(sampling.stop_token_ids),
        )

    def _release(self, name: str) -> None:
        """A request has its first token: its prompt is there for those that wait for it."""
        with self._lock:
            if name in self._pending:
                self._release_prompt(name, self._pending[name].prompt)

    def _release_prompt(self, name: str, prompt: tuple[int, ...]) -> None:
        if prompt in self._waiting and self._waiting[prompt][0] == name:
            for other in self._waiting.pop(prompt)[1]:
                if other in self._pending and not self._closed:
                    self._hand_over(other, self._pending[other])

    def _drop(self, name: str) -> _Pending | None:
        with self._lock:
            self._sampler.remove(name)
            pending = self._pending.pop(name, None)
            if pending is not None:
                self._release_prompt(name, pending.prompt)
            return pending

    def _check_serving(self) -> None:
        if self._closed:
            raise RuntimeError("the rollout was closed: make another one")
        if self._failed or not self._manager.is_running():
            raise RuntimeError(f"generation has failed: {self._cause()}") from self._fatal()

    def _fatal(self) -> BaseException | None:
        return self._manager.background_thread_status.fatal_error

    def _cause(self) -> str:
        error = self._fatal()
        return "its thread is gone" if error is None else f"{type(error).__name__}: {error}"

    @contextmanager
    def _paused(self) -> Iterator[None]:
        with self._lock:
            self._check_serving()
        with self._manager.pause():
            yield

    def _forget_prefixes(self) -> None:
        processor = self._manager.batch_processor
        if processor is None:
            raise RuntimeError(
                "generation is paused, and has no batch processor: this release of transformers is unknown"
            )
        processor.cache.evict_cached_blocks()
        for allocator in processor.cache.cache_allocators.values():
            allocator.ledger.hash_to_block.clear()
            allocator.ledger.block_to_hash.clear()
        self._sampler.keep_private(list(processor.scheduler.active_requests))

    def _break(self, why: str) -> None:
        with self._lock:
            self._broken = why
        for name in list(self._pending):
            pending = self._drop(name)
            self._manager.cancel_request(name)
            if pending is not None:
                _settle(pending.future, RuntimeError(f"{why}: the weights are mixed"))

    def _collect(self) -> None:
        while True:
            running = self._manager.is_running()
            result = self._manager.get_result(timeout=_POLL)
            if result is not None:
                self._finish(result)
            elif not running:
                break
            elif not threading.main_thread().is_alive():
                self._manager.stop(hard_stop=True)  # nobody will call close, and the interpreter waits for threads
        with self._lock:
            self._failed = True
        for name in list(self._pending):
            self._end(name, f"generation has failed: {self._cause()}")

    def _finish(self, result: GenerationOutput) -> None:
        if result.status != RequestStatus.FINISHED:
            self._end(result.request_id, f"generation has failed: {result.error}")
            return
        pending = self._drop(result.request_id)
        if pending is not None and pending.request.tokens != result.generated_tokens:
            error = (
                f"{result.request_id}: other tokens came back than were drawn: this release of transformers is unknown"
            )
            _settle(pending.future, RuntimeError(error))
        elif pending is not None:
            _settle(pending.future, pending.request.completion())

    def _end(self, name: str, why: str) -> None:
        """Settle what did not come to its end."""
        pending = self._drop(name)
        if pending is not None and self._closed:
            _settle(pending.future, pending.request.completion("aborted"))
        elif pending is not None:
            _settle(pending.future, RuntimeError(why))


def _settle(future: Future[Completion], answer: Completion | RuntimeError) -> None:
    if not future.set_running_or_notify_cancel():
        return
    if isinstance(answer, Completion):
        future.set_result(answer)
    else:
        future.set_exception(answer)


def _manager(
    model: PreTrainedModel, config: ContinuousBatchingConfig, sampler: RequestSampler
) -> ContinuousBatchingManager:
    if not isinstance(model, GenerationMixin):
        raise ValueError(f"{type(model).__name__} cannot generate: the replica is to be a causal language model")
    if not hasattr(ContinuousBatchingManager, "pause"):
        raise RuntimeError(
            f"transformers {transformers.__version__} cannot pause generation for new weights: install 5.23 or newer"
        )
    manager = model.init_continuous_batching(
        # Greedy, so that it takes the token that the sampler leaves on top; stop tokens belong to a request.
        generation_config=GenerationConfig(do_sample=False, eos_token_id=-1),
        continuous_batching_config=config,
    )
    if manager.logit_processor is None or manager.is_running():
        raise RuntimeError("this release of transformers takes its logits processors otherwise")
    manager.logit_processor = sampler
    return manager


def _check_sizes(
    model: PreTrainedModel,
    max_context: int,
    max_requests: int,
    cache_tokens: int,
    page_size: int,
    max_batch_tokens: int,
) -> None:
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or max_context
    limits = {
        "max_context": (max_context, 2, positions, "a prompt and an answer, and as much as the model was made for"),
        "max_requests": (max_requests, 1, None, "one answer"),
        "page_size": (page_size, 4, None, "what transformers allows"),
        "max_batch_tokens": (max_batch_tokens, max_requests, None, "a token for each of max_requests"),
        "cache_tokens": (cache_tokens, -(-max_context // page_size) * page_size, None, "one answer of max_context"),
    }
    for name, (value, low, high, rule) in limits.items():
        if value < low or (high is not None and value > high):
            most = "" if high is None else f" and at most {high}"
            raise ValueError(f"{name} = {value}: it must be at least {low}{most} ({rule})")
