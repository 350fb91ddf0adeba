"""Costs of the client of inference servers, on one real vLLM server on the CPU: updates under load, and tokens per second.

``make bench-servers``
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx2
import torch

from areal.inference import VLLM, HTTPRollout
from areal.tests.grid.models import FAMILIES, tiny_model
from areal.tests.vllm.answers import Clients, endless, prompt
from areal.tests.vllm.exchanges import completion, generation
from areal.tests.vllm.server import PYTHON, SIZES, VLLMProcess
from areal.weight_sync.apply import ModuleSource

CLIENTS = 48
ANSWERS, TOKENS = 3, 100
"""Answers that each of the clients asks for, one after the other, and their tokens."""
ROUTES = {"/inference/v1/generate": generation, "/v1/completions": completion}


def update_seconds(rollout: HTTPRollout, version: int) -> float:
    """Return the seconds of an update, without those of making the weights."""
    tensors = list(ModuleSource(tiny_model(FAMILIES["qwen3"](**SIZES), version)).named_tensors())
    start = time.perf_counter()
    rollout.update(iter(tensors), version)
    return time.perf_counter() - start


def updates(rollout: HTTPRollout, rounds: int) -> tuple[list[float], list[float], int]:
    """Time updates without and with clients in turn. Returns both, and the number of answers."""
    quiet, busy, answered = [], [], 0
    for number in range(rounds):
        quiet.append(update_seconds(rollout, 2 * number + 1))
        with Clients(rollout, CLIENTS, [4]) as clients:
            clients.wait_for(2 * CLIENTS)
            busy.append(update_seconds(rollout, 2 * number + 2))
            clients.wait_for(CLIENTS)
        # A client whose request failed has ended.
        if clients.faults:
            raise RuntimeError(f"{len(clients.faults)} requests were lost") from clients.faults[0]
        answered += len(clients.answered)
    return quiet, busy, answered


Ask = Callable[[int, int], Awaitable[int]]
"""Asks for an answer to a prompt with a seed. Returns the number of its tokens."""


async def tokens_of_clients(ask: Ask, seed: int) -> int:
    """Run clients that each ask for one answer after the other. Returns the number of tokens."""

    async def client(number: int) -> int:
        return sum([await ask(number + CLIENTS * i, seed + number + CLIENTS * i) for i in range(ANSWERS)])

    return sum(await asyncio.gather(*(client(number) for number in range(CLIENTS))))


def through_client(rollout: HTTPRollout, seed: int) -> float:
    """Return tokens per second through the client."""

    async def ask(number: int, seed: int) -> int:
        return len((await rollout.generate(prompt(number), endless(TOKENS, seed=seed))).tokens)

    start = time.perf_counter()
    return asyncio.run(tokens_of_clients(ask, seed)) / (time.perf_counter() - start)


class BareLoop:
    """Sends the same requests, reads the replies as JSON, and keeps its connections, as the client does."""

    def __init__(self, url: str, route: str) -> None:
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=3)
        self._http = httpx2.AsyncClient(base_url=url, limits=limits, trust_env=False, timeout=300)
        self._route, self._loop = route, asyncio.Runner()

    def tokens_per_second(self, seed: int) -> float:
        """Return tokens per second of one round."""
        start = time.perf_counter()
        return self._loop.run(tokens_of_clients(self._ask, seed)) / (time.perf_counter() - start)

    async def _ask(self, number: int, seed: int) -> int:
        name = "prompt" if self._route == "/v1/completions" else "token_ids"
        body: dict[str, Any] = ROUTES[self._route](**{name: prompt(number), "max_tokens": TOKENS, "seed": seed})
        answer = await self._http.post(self._route, json={**body, "request_id": f"by-hand-{seed}"})
        return len(answer.json()["choices"][0]["token_ids"])

    def close(self) -> None:
        """Close the connections."""
        self._loop.run(self._http.aclose())
        self._loop.close()


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    if not PYTHON.exists():
        raise SystemExit(f"{PYTHON} is missing: run `make bench-servers`")
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        tiny_model(FAMILIES["qwen3"](**SIZES), 0).save_pretrained(model)
        # The server has a core of its own: otherwise the scheduler decides which of them is slower.
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[:1])
        vllm = VLLMProcess(str(model))
        os.sched_setaffinity(0, cores[1:] or cores)
        load = os.getloadavg()[0]
        try:
            with HTTPRollout(vllm.url, VLLM(), folder=Path(folder) / "weights", model=str(model)) as rollout:
                through_client(rollout, 0)
                route = next(each for each in ROUTES if vllm.asked(each))
                loop = BareLoop(vllm.url, route)
                loop.tokens_per_second(0)
                # In turn, because the speed of the machine changes, and in alternating order.
                rates = []
                for number in range(1, rounds + 1):
                    ways = [lambda seed: through_client(rollout, seed), loop.tokens_per_second]
                    measured = [way(10_000 * number) for way in ways[:: 1 if number % 2 else -1]]
                    rates.append(measured[:: 1 if number % 2 else -1])
                loop.close()
                quiet, busy, answered = updates(rollout, rounds)
        finally:
            vllm.close()
    print(f"{rounds} rounds; load of the machine at the start {load:.1f}, on {os.cpu_count()} cores; {route}")
    print(f"{'update (median, ms)':34}{'quiet':>10}{f'{CLIENTS} clients':>12}{'ratio':>8}{'lost':>6}{'answers':>9}")
    before, under = 1e3 * statistics.median(quiet), 1e3 * statistics.median(busy)
    print(f"{'':34}{before:10.0f}{under:12.0f}{under / before:8.2f}{0:6d}{answered:9d}")
    client, bare = (statistics.median(column) for column in zip(*rates, strict=True))
    ratio = statistics.median(mine / theirs for mine, theirs in rates)
    print(f"{'generation (median, tokens/s)':34}{'bare':>10}{'client':>12}{'ratio':>8}")
    print(f"{'':34}{bare:10.0f}{client:12.0f}{ratio:8.2f}")


if __name__ == "__main__":
    main()
