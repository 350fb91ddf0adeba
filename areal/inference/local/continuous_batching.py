"""Continuous batching of transformers, with the sampler of this package."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation import ContinuousBatchingConfig, ContinuousBatchingManager
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor, OutputRouter
from transformers.generation.continuous_batching.requests import GenerationOutput

from areal.engine.model.hub import max_positions
from areal.inference.local.adapter_router import AdapterRouter
from areal.inference.local.invariant_replica import PAGED_INVARIANT, make_invariant
from areal.inference.local.sampler import RequestSampler
from areal.inference.local.shared_prompts import share_by_content
from areal.inference.protocol import checked_prompt
from areal.utils.offload import storage_bytes
from areal.utils.releases import require_release

_MARGIN = 0.15
"""Fraction of the cache reserved for the prompts of later requests, in addition to the running answers."""


_START_SECONDS = 60.0
"""Limit of the wait for the cache of a manager that was started."""


@dataclass(frozen=True)
class GenerationLimits:
    """Sizes of generation; see :class:`~areal.inference.local.rollout.LocalRollout`."""

    max_context: int
    max_requests: int
    cache_tokens: int
    page_size: int
    max_batch_tokens: int
    batch_invariant: bool = False

    def prepare(self, model: PreTrainedModel) -> None:
        """Check the sizes, and let the model compute with the same bits in any batch if that is asked for.

        Raises:
            ValueError: names the first size out of range, or what batch invariance does not support.
        """
        self.check(model)
        if self.batch_invariant:
            make_invariant(model)

    def check(self, model: PreTrainedModel) -> None:
        """Raise a ``ValueError`` that names the first size out of range."""
        positions = max_positions(model.config) or self.max_context
        context = -(-self.max_context // self.page_size) * self.page_size
        limits = {
            "max_context": (2, positions, "a prompt and an answer, and as much as the model was made for"),
            "max_requests": (1, None, "one answer"),
            "page_size": (4, None, "what transformers allows"),
            "max_batch_tokens": (self.max_requests, None, "a token for each of max_requests"),
            "cache_tokens": (context, None, "one answer of max_context"),
        }
        for name, (low, high, rule) in limits.items():
            value = getattr(self, name)
            if value < low or (high is not None and value > high):
                most = "" if high is None else f" and at most {high}"
                raise ValueError(f"{name} = {value}: it must be at least {low}{most} ({rule})")

    def checked(self, prompt_ids: Sequence[int], new_tokens: int, vocab_size: int) -> list[int]:
        """Return a prompt as a list, or raise a ``ValueError``."""
        prompt = checked_prompt(prompt_ids)
        # min and max before a loop: many answers have the same long prompt.
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            unknown = next(token for token in prompt if not 0 <= token < vocab_size)
            raise ValueError(f"prompt_ids has the token {unknown}: the model knows 0 to {vocab_size - 1}")
        if len(prompt) + new_tokens > self.max_context:
            raise ValueError(
                f"{len(prompt)} prompt tokens and max_new_tokens = {new_tokens} are longer than max_context = "
                f"{self.max_context}: shorten one, or make the rollout with more"
            )
        return prompt

    def manager(
        self,
        model: PreTrainedModel,
        sampler: RequestSampler,
        router: AdapterRouter,
        finished: Callable[[GenerationOutput], None],
        ended: Callable[[], None],
    ) -> GenerationManager:
        """Create a manager of continuous batching, with an empty cache. It is not started.

        See :class:`~areal.inference.local.continuous_batching.GenerationManager`.

        Raises:
            ValueError: the model cannot generate, its attention is not supported, or transformers is too old.
        """
        if not isinstance(model, GenerationMixin):
            raise ValueError(f"{type(model).__name__} cannot generate: the replica is to be a causal language model")
        # Before that, generation cannot pause for new weights.
        require_release("transformers", (5, 19), "LocalRollout")
        invariant = self.batch_invariant and model.device.type == "cpu"
        if invariant:  # the manager accepts attention that it knows
            model.set_attn_implementation("sdpa")
        manager = GenerationManager(
            router,
            finished,
            ended,
            model=model,
            # Greedy: it selects the token to which the sampler gave the highest score. Stop tokens are set per request.
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=self.page_size,
                # The margin is part of the blocks, so that cache_tokens remain for running answers.
                num_blocks=int(self.cache_tokens / self.page_size / (1 - _MARGIN)) + 1,
                max_batch_tokens=self.max_batch_tokens,
                max_requests_per_batch=self.max_requests,
                safety_margin=_MARGIN,
                use_async_batching=False,
                use_cuda_graph=False,
                auto_switch_to_flash=False,
            ),
        )
        if manager.logit_processor is None or manager.is_running():
            raise RuntimeError("this release of transformers takes its logits processors otherwise")
        manager.logit_processor = sampler
        if invariant:
            model.set_attn_implementation(PAGED_INVARIANT)
        return manager


def forget_prefixes(manager: ContinuousBatchingManager) -> list[str]:
    """Remove all prompts from the cache of a paused manager, so that no later request finds them. Returns the names of running requests."""
    processor = manager.batch_processor
    if processor is None:
        raise RuntimeError("generation is paused, and has no batch processor: this release of transformers is unknown")
    processor.cache.evict_cached_blocks()
    # Blocks of running requests stay allocated, but must not be found by their hash any more.
    for allocator in processor.cache.cache_allocators.values():
        allocator.ledger.hash_to_block.clear()
        allocator.ledger.block_to_hash.clear()
    return list(processor.scheduler.active_requests)


def cache_bytes(manager: ContinuousBatchingManager) -> int:
    """Return the bytes of the cache of keys and values. Waits until the manager's thread has allocated it.

    Raises:
        RuntimeError: generation does not run.
    """
    limit = time.monotonic() + _START_SECONDS
    while manager.batch_processor is None:
        if not manager.is_running() or time.monotonic() > limit:
            raise RuntimeError("generation does not run, and has no cache to measure: call wake() first")
        time.sleep(0.01)
    cache = manager.batch_processor.cache
    members = [value for each in (cache, *cache.cache_allocators.values()) for value in vars(each).values()]
    tensors = [x for value in members for x in (value if isinstance(value, list) else [value])]
    return storage_bytes(x for x in tensors if isinstance(x, Tensor))


class _Results(OutputRouter):
    """Passes each result to a function, on the generation thread."""

    def __init__(self, finished: Callable[[GenerationOutput], None]) -> None:
        super().__init__()
        self._finished = finished

    def deliver(self, output: GenerationOutput) -> None:
        self._finished(output)

    def deliver_batch(self, outputs: list[GenerationOutput]) -> None:
        for output in outputs:
            self._finished(output)


class _WakeUp(threading.Event):
    """Event on which the loop waits for work. It waits for a limited time only while requests cannot be scheduled."""

    def __init__(self, busy: Callable[[], bool]) -> None:
        super().__init__()
        self._busy = busy

    def wait(self, timeout: float | None = None) -> bool:
        return super().wait(timeout if self._busy() else None)


class GenerationManager(ContinuousBatchingManager):
    """Manager of continuous batching with adapters, and without a queue of results. It stops at the exit of the interpreter.

    Args:
        router: applies adapters.
        finished: called on the generation thread with the result of each request.
        ended: called on the generation thread at the end of generation, after the last result.
        options: arguments of transformers' manager.
    """

    def __init__(
        self,
        router: AdapterRouter,
        finished: Callable[[GenerationOutput], None],
        ended: Callable[[], None],
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._router, self._ended = router, ended
        self.output_router = _Results(finished)
        self._wake_up_loop = _WakeUp(self._has_requests)

    def start(self) -> None:
        """Start the generation thread."""
        self.background_thread_status.clear()
        # A daemon, so that the interpreter does not wait for it before it calls the functions registered for its exit.
        thread: Any = threading.Thread(target=self._run_generation_loop, name="rollout", daemon=True)
        self._generation_thread = thread
        atexit.register(self._stop_at_exit)
        thread.start()

    def join(self, stop_trigger_time: float, timeout: float | None = None) -> None:
        """Wait for the generation thread, which was asked to stop."""
        self._wake_up_loop.set()
        super().join(stop_trigger_time, timeout)
        atexit.unregister(self._stop_at_exit)

    def _stop_at_exit(self) -> None:
        self.stop(hard_stop=True)

    def _has_requests(self) -> bool:
        processor = self.batch_processor
        return processor is not None and processor.has_pending_requests()

    def _create_batch_processor(self) -> ContinuousBatchProcessor:
        processor = super()._create_batch_processor()
        share_by_content(processor.cache, self.model.config.get_text_config().vocab_size)
        _unblock_by_cancellations(processor.scheduler)
        self._router.stream = processor.inputs_and_outputs.compute_stream
        return processor

    def _run_generation_loop(self) -> None:
        try:
            super()._run_generation_loop()
        finally:
            self._ended()


def _unblock_by_cancellations(scheduler: Any) -> None:
    """Let requests begin after a running one was cancelled: with a full cache, transformers waits for one that finishes."""
    clear = scheduler.clear_cancelled_requests

    def clear_and_unblock() -> Any:
        running = len(scheduler.active_requests)
        cancelled = clear()
        if len(scheduler.active_requests) < running:
            scheduler.block_new_requests = False
        return cancelled

    scheduler.clear_cancelled_requests = clear_and_unblock
