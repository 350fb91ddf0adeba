"""The sampler on vLLM servers that fail, are lost or return, and requests that are cancelled."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from areal.tests.harness.servers.vllm_server import VLLMServer
from areal.tests.unit.tinker.backends.vllm.http_sampling import CONTEXT, MODEL, PROMPT, asked, serve, until
from areal.tinker.backends.errors import ServerError
from areal.tinker.backends.sampling.vllm.http_sampler import VLLMSampler


def test_internal_errors_are_the_servers_and_short_ones_are_retried(server: VLLMServer) -> None:
    async def once(sampler: VLLMSampler) -> None:
        server.canned = [500]
        with pytest.raises(ServerError, match=r"not available, send the request again: .*status 500"):
            await sampler.sample("base", asked())
        assert not sampler.healthy()
        await sampler.sample("base", asked())
        assert sampler.healthy()

    async def again(sampler: VLLMSampler) -> None:
        server.canned = [503, 500]
        await sampler.sample("base", asked())

    serve(server, once)
    serve(server, again, retry_seconds=5)


def test_dead_server_and_one_that_has_lost_its_adapters(
    server: VLLMServer, adapters: tuple[Path, Any], tmp_path: Path
) -> None:
    folder = shutil.copytree(adapters[0] / "second", tmp_path / "second")

    async def work(sampler: VLLMSampler) -> None:
        await sampler.open("second", folder)
        shutil.rmtree(folder)
        before = (await sampler.sample("second", asked())).answers[0]
        server.stop()
        # Nobody asks the server until the state is old, and then once, in the background.
        await until(lambda: not sampler.healthy())
        with pytest.raises(ServerError, match="not available"):
            await sampler.sample("second", asked(prompt=PROMPT[1:]))
        server.start()
        await until(sampler.healthy)
        results = await asyncio.gather(*(sampler.sample("second", asked()) for _ in range(3)))
        for result in results:
            assert result.answers[0].tokens.tolist() == before.tokens.tolist()

    serve(server, work, health_seconds=0.05)


def test_health_is_not_asked_for_while_nobody_looks(server: VLLMServer) -> None:
    async def work(sampler: VLLMSampler) -> None:
        await asyncio.sleep(0.2)
        assert server.calls["/health"] == 0
        assert sampler.healthy()
        assert sampler.healthy()
        await until(lambda: server.calls["/health"] == 1)

    serve(server, work, health_seconds=0.1)


def test_cancelled_request_ends_on_the_server(server: VLLMServer, adapters: tuple[Path, Any]) -> None:
    async def work(sampler: VLLMSampler) -> None:
        await sampler.open("one", adapters[0] / "default")
        server.step_seconds = 0.03
        task = asyncio.create_task(sampler.sample("one", asked(num_samples=3, max_tokens=50)))
        await until(lambda: server.calls["/v1/completions"] >= 3 + 2)  # after two probes
        await sampler.release("one")
        assert len(server.adapters) == 1  # it is in use
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: server.ended == 3)
        await until(lambda: not server.adapters)

    serve(server, work)


def test_requests_go_to_another_server_while_one_is_gone(server: VLLMServer, adapters: tuple[Path, Any]) -> None:
    other = VLLMServer(MODEL, context=CONTEXT)

    async def work(sampler: VLLMSampler) -> None:
        async def answers() -> list[list[int]]:
            asked_for = (sampler.sample("one", asked(num_samples=2)) for _ in range(4))
            results = await asyncio.gather(*asked_for, return_exceptions=True)
            assert not [each for each in results if isinstance(each, BaseException)]
            return [answer.tokens.tolist() for result in results for answer in result.answers]

        await sampler.open("one", adapters[0] / "default")
        assert len(server.adapters) == len(other.adapters) == 1
        before, asked_of = await answers(), [each.calls["/v1/completions"] for each in (server, other)]
        assert min(asked_of) >= 1 + 4  # a probe, and half of the answers
        server.stop()
        assert await answers() == before
        assert sampler.healthy()
        # One that is started anew gets the adapter with its first request.
        server.start()
        async with asyncio.timeout(10):
            while not server.adapters:
                assert await answers() == before
        await sampler.release("one")
        assert not server.adapters
        assert not other.adapters

    try:
        serve(server, work, url=[server.url, other.url])
    finally:
        other.stop()


def test_adapter_is_opened_while_a_server_is_gone(server: VLLMServer, adapters: tuple[Path, Any]) -> None:
    other = VLLMServer(MODEL, context=CONTEXT)

    async def work(sampler: VLLMSampler) -> None:
        other.stop()
        await sampler.open("one", adapters[0] / "default")
        await sampler.sample("one", asked())
        server.stop()
        with pytest.raises(ServerError, match="not available"):
            await sampler.open("two", adapters[0] / "second")

    try:
        serve(server, work, url=[server.url, other.url])
    finally:
        other.stop()
