"""Continuous batching of transformers without polling: results are delivered at once, and an idle loop sleeps."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from typing import Any

from transformers.generation import ContinuousBatchingManager
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor, OutputRouter
from transformers.generation.continuous_batching.requests import GenerationOutput

from areal.inference.local.adapter_router import AdapterRouter
from areal.inference.local.shared_prompts import share_by_adapter


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
        share_by_adapter(processor.cache, self.model.config.get_text_config().vocab_size)
        self._router.stream = processor.inputs_and_outputs.compute_stream
        return processor

    def _run_generation_loop(self) -> None:
        try:
            super()._run_generation_loop()
        finally:
            self._ended()
