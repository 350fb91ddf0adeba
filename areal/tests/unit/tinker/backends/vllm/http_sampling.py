"""The sampler on vLLM servers in a test, and requests to it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from areal.tests.grid.models import VOCAB
from areal.tests.harness.servers.vllm_server import VLLMServer
from areal.tests.unit.tinker.backends.sampling import ENDLESS, base_model
from areal.tinker.backends.backend_registry import create_sampling_backend
from areal.tinker.backends.prepared import SamplingRequest
from areal.tinker.backends.sampling.vllm.http_sampler import VLLMSampler

CONTEXT = 64
PROMPT = [(7 * i + 3) % VOCAB for i in range(11)]
MODEL = base_model(tied=False)


def serve(server: VLLMServer, work: Callable[[VLLMSampler], Awaitable[Any]], **settings: Any) -> Any:
    """Run a coroutine function on a sampler, with the snapshot ``base`` of the model."""

    async def main() -> Any:
        sampler = create_sampling_backend(MODEL, "vllm", {"url": server.url, "retry_seconds": 0, **settings})
        assert isinstance(sampler, VLLMSampler)
        try:
            await sampler.open("base", None)
            return await asyncio.wait_for(work(sampler), 30)  # type: ignore[arg-type]
        finally:
            await sampler.close()

    return asyncio.run(main())


def asked(**fields: Any) -> SamplingRequest:
    return SamplingRequest(**{"prompt": PROMPT, "max_tokens": 8, "seed": 5, **ENDLESS, **fields})


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)
