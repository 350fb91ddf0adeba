"""Requests that a server gets at once: the limit on simulated servers, the line of answers that wait, and both over HTTP."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from areal.inference.http import VLLM, HTTPRollout
from areal.inference.http import concurrency_limit as module
from areal.inference.http.concurrency_limit import ConcurrencyLimit
from areal.inference.http.waiting_line import WaitingLine
from areal.inference.protocol import Completion, Sampling
from areal.tests.harness.limits import PROMPTLY
from areal.tests.harness.servers.canned_server import CannedServer, canned_servers

Speed = Callable[[int], float]
"""Tokens per second of each of a number of requests at once."""

SPEEDS: dict[str, tuple[Speed, int]] = {
    "16 slots": (lambda count: min(1.0, 16 / count), 16),
    "100 slots": (lambda count: min(1.0, 100 / count), 100),
    "step takes longer with each request": (lambda count: 1 / (1 + count / 100), 256),
    "preemptions beyond 128": (lambda count: 1.0 if count <= 128 else (128 / count) ** 1.5, 128),
}
"""Speed of a server, and the best fixed limit of at most 256."""


def with_slots(slots: int) -> Speed:
    """Return the speed of a server that generates a number of answers at once."""
    return lambda count: min(1.0, slots / count)


class Simulation:
    """A server with as many requests as it may have, of random lengths, on a clock of its own."""

    def __init__(self) -> None:
        self.now, self._done, self._draw = 0.0, 0.0, random.Random(0)
        self._running: list[tuple[float, float, int]] = []

    def throughput(self, limit: ConcurrencyLimit | None, speed: Speed, replies: int, fixed: int = 0) -> float:
        """Return tokens per second of some replies."""
        tokens, start = 0, self.now
        for _ in range(replies):
            while len(self._running) < (limit.value if limit else fixed):
                length = max(1, int(100 * self._draw.lognormvariate(0, 0.5)))
                heapq.heappush(self._running, (self._done + length, self.now, length))
            end, began, length = heapq.heappop(self._running)
            self.now += (end - self._done) / speed(len(self._running) + 1)
            self._done = end
            tokens += length
            if limit:
                limit.note(began, length, len(self._running) + 1)
        return tokens / (self.now - start)


@pytest.fixture
def simulation(monkeypatch: pytest.MonkeyPatch) -> Simulation:
    made = Simulation()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: made.now))
    return made


@pytest.mark.parametrize("name", SPEEDS)
def test_limit_has_the_throughput_of_the_best_fixed_one(simulation: Simulation, name: str) -> None:
    speed, best = SPEEDS[name]
    limit = ConcurrencyLimit(256)
    simulation.throughput(limit, speed, 4000)
    found = simulation.throughput(limit, speed, 4000)
    assert found > 0.9 * Simulation().throughput(None, speed, 4000, fixed=best)
    assert limit.value <= 2 * best


def test_limit_follows_a_server_that_becomes_slower_and_faster(simulation: Simulation) -> None:
    limit = ConcurrencyLimit(128)
    for slots in (32, 8, 64):
        simulation.throughput(limit, with_slots(slots), 4000)
        assert slots / 1.6 <= limit.value <= 1.6 * slots


def test_limit_stays_with_less_to_do(simulation: Simulation) -> None:
    limit = ConcurrencyLimit(64)
    for _ in range(100):
        simulation.now += 1.0
        limit.note(simulation.now - 1.0, 100, in_flight=63)
        assert limit.value == 64


def test_requests_that_began_before_the_measurement_do_not_count(simulation: Simulation) -> None:
    limit = ConcurrencyLimit(16)
    simulation.now = 100.0
    limit.restart()
    for _ in range(20):
        simulation.now += 0.1
        limit.note(99.0, 100, in_flight=16)
        assert limit.value == 16
    for _ in range(16):
        simulation.now += 1.0
        limit.note(simulation.now - 0.5, 100, in_flight=16)
    assert limit.value == 8


@pytest.mark.parametrize("maximum", [1, 2, 3])
def test_limit_is_at_least_one_and_at_most_the_maximum(simulation: Simulation, maximum: int) -> None:
    limit, seen = ConcurrencyLimit(maximum), set()
    for _ in range(50):
        simulation.throughput(limit, lambda count: 1.0, 16)
        seen.add(limit.value)
    assert min(seen) >= 1
    assert max(seen) == maximum


# ---- the line


def in_line(*steps: int, cancel_at: int | None = None) -> list[int]:
    """Return the order in which three answers go on, woken so many at each step. The first answer is cancelled before a step."""

    async def run() -> list[int]:
        line, order = WaitingLine(), list[int]()

        async def answer(number: int, ticket: int) -> None:
            await line.wait(ticket, None)
            order.append(number)

        tasks = [asyncio.create_task(answer(number, line.ticket())) for number in range(3)]
        await asyncio.sleep(0)
        for step, count in enumerate((*steps, 0)):
            if step == cancel_at:
                tasks[0].cancel()
            line.wake(count)
        await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        return order

    return asyncio.run(run())


def test_answers_go_on_in_their_order() -> None:
    assert in_line(2) == [0, 1]
    assert in_line(3) == [0, 1, 2]


def test_answer_that_was_chosen_has_its_place() -> None:
    # Two replies in one turn of the event loop tell of one place, and then of two.
    assert in_line(1, 2) == [0, 1]


def test_cancelled_answer_leaves_its_turn_to_the_next() -> None:
    assert in_line(1, cancel_at=1) == [1]
    assert in_line(1, cancel_at=0) == [1]


def test_answer_waits_for_a_limited_time() -> None:
    async def run() -> None:
        line = WaitingLine()
        with pytest.raises(TimeoutError):
            await line.wait(line.ticket(), 0.01)
        # It does not take the turn of another one.
        other = asyncio.create_task(line.wait(line.ticket(), 1.0))
        await asyncio.sleep(0)
        line.wake(1)
        await other

    asyncio.run(run())


# ---- over HTTP


def answers(rollout: HTTPRollout, count: int, clients: int, tokens: int = 4) -> list[Completion]:
    """Return answers to different prompts."""
    numbers = iter(range(count))

    async def client() -> list[Completion]:
        sampling = Sampling(max_new_tokens=tokens, stop_token_ids=())
        return [await rollout.generate([number + 1, 7], sampling) for number in numbers]

    async def run() -> Iterator[list[Completion]]:
        return iter(await asyncio.gather(*(client() for _ in range(clients))))

    return list(itertools.chain.from_iterable(asyncio.run(run())))


def test_two_thousand_requests_at_once_on_sixteen_servers(tmp_path: Path) -> None:
    servers = [CannedServer(4, 0.05) for _ in range(16)]
    with canned_servers(*servers) as urls, HTTPRollout(urls, VLLM(), folder=tmp_path, max_requests=20) as rollout:
        found = answers(rollout, 2000, 2000)
        assert {(len(each.tokens), each.versions, each.finish_reason) for each in found} == {(4, (0,) * 4, "length")}
        assert rollout.counts == {"failed": 0, "discarded": 0, "away": 0, "restarted": 0}
    assert sum(server.answered for server in servers) == len(found) == 2000
    assert max(server.most for server in servers) <= 20
    assert min(server.answered for server in servers) > 60


def test_slower_server_gets_fewer_requests(tmp_path: Path) -> None:
    slow, fast = CannedServer(4, 0.05, slots=2), CannedServer(4, 0.05, slots=8)
    with canned_servers(slow, fast) as urls, HTTPRollout(urls, VLLM(), folder=tmp_path, max_requests=32) as rollout:
        answers(rollout, 700, 64)
    assert slow.answered + fast.answered == 700
    assert fast.answered > 2 * slow.answered


def test_answer_that_waits_for_its_turn_has_no_deadline(tmp_path: Path) -> None:
    with (
        canned_servers(CannedServer(4, 0.1)) as urls,
        HTTPRollout(urls, VLLM(), folder=tmp_path, max_requests=1, deadline=0.25) as rollout,
    ):
        assert len(answers(rollout, 6, 6)) == 6


def test_maximum_below_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_requests = 0"):
        HTTPRollout("http://127.0.0.1:1", VLLM(), folder=tmp_path, max_requests=0)


@pytest.mark.parametrize(("most", "counts"), [(1, (1, 1, 2)), (4, (4, 8, 4))])
def test_answers_behind_too_long_ones_go_on(most: int, counts: tuple[int, int, int], tmp_path: Path) -> None:
    """A prompt that is too long for the server takes a turn, and must pass it on."""
    server = CannedServer(4, 0.5)
    paths = json.loads(server.replies[b"/openapi.json"])["paths"]
    server.replies[b"/openapi.json"] = json.dumps({"paths": {**paths, "/v1/models": {}}}).encode()
    card = {"id": "m", "root": None, "parent": None, "max_model_len": 32}
    server.replies[b"/v1/models"] = json.dumps({"data": [card]}).encode()

    async def ask(rollout: HTTPRollout) -> list[object]:
        tasks = []
        for count, prompt in zip(counts, ([1, 7], [1] * 100, [2, 7]), strict=True):
            tasks += [
                asyncio.ensure_future(rollout.generate(prompt, Sampling(4, stop_token_ids=()))) for _ in range(count)
            ]
            await asyncio.sleep(0.1)
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), PROMPTLY)

    with (
        canned_servers(server) as urls,
        HTTPRollout(urls, VLLM(), folder=tmp_path, max_requests=most, deadline=2) as rollout,
    ):
        answers = asyncio.run(ask(rollout))
    running, long, _ = counts
    for number, answer in enumerate(answers):
        assert isinstance(answer, ValueError if running <= number < running + long else Completion), (number, answer)
