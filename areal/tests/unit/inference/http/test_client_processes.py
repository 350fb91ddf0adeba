"""Requests that client processes send: the same answers, and what happens when a request, a process or the owner ends."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path

import pytest

from areal.inference import VLLM, HTTPRollout, Sampling
from areal.inference.http.servers.dialect import Ask, Routes
from areal.tests.harness.limits import wait_until
from areal.tests.harness.servers.canned_server import CannedServer, canned_servers
from areal.tests.harness.servers.rollout_http import PROMPT, Background, Process, assert_true_versions, run, weights
from areal.tests.unit.inference.http.conftest import Make
from areal.tests.unit.inference.local.rollouts import endless

TOKENS, COMPLETIONS = "/inference/v1/generate", "/v1/completions"


def processes(rollout: HTTPRollout) -> list[int]:
    """Return the ids of the client processes."""
    return [client._process.pid for client in rollout._clients._clients]


def runs(process: int) -> bool:
    """Return whether a process of this user is there, also as a zombie."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("kind", ["tokens", "completions"])
def test_answers_and_updates_are_those_of_one_process(make_vllm: Make, vllm: Process, kind: str) -> None:
    """Also where an update interrupts answers, and where the label is asked for after each new connection. None of them is left at the end."""
    vllm.tell(without=[] if kind == "tokens" else [TOKENS])
    sampling = [Sampling(max_new_tokens=12, seed=seed, top_logprobs=2 * (seed == 3)) for seed in range(6)]
    with make_vllm(vllm) as alone:
        expected = run(*(alone.generate(PROMPT, each) for each in sampling))
    rollout = make_vllm(vllm, client_processes=2)
    started = processes(rollout)
    assert run(*(rollout.generate(PROMPT, each) for each in sampling)) == expected
    # An update in the middle.
    vllm.tell(step_seconds=0.03)
    drawn = vllm.drawn()
    background = Background(*(rollout.generate(PROMPT, endless(40, seed=seed)) for seed in range(4)))
    wait_until(lambda: vllm.drawn() >= drawn + 12)
    rollout.update(weights(1), 1)
    for answer in background.result():
        assert len(answer.tokens) == 40
        assert set(answer.versions) == {0, 1}
        assert_true_versions(answer)
    vllm.can(TOKENS if kind == "tokens" else COMPLETIONS, status=400, body="no such token")
    with pytest.raises(ValueError, match="status 400: no such token"):
        run(rollout.generate(PROMPT, endless(4)))
    # Both have had requests.
    assert all(next(client._numbers) > 3 for client in rollout._clients._clients)
    rollout.close()
    assert not any(map(runs, started))


def test_killed_process_loses_no_answer(make_vllm: Make, vllm: Process) -> None:
    """The other one sends its requests again, and after that the owner."""
    vllm.tell(step_seconds=0.03)
    rollout = make_vllm(vllm, client_processes=2)
    expected = [answer.tokens for answer in run(*(rollout.generate(PROMPT, endless(20, seed=i)) for i in range(4)))]
    for left in (1, 0):
        drawn, had = vllm.drawn(), rollout.counts["discarded"]
        background = Background(*(rollout.generate(PROMPT, endless(20, seed=i)) for i in range(4)))
        wait_until(lambda drawn=drawn: vllm.drawn() > drawn)
        victim = next(client for client in rollout._clients._clients if not client.lost)
        assert len(victim.pending) == 4 - 2 * left
        os.kill(victim._process.pid, signal.SIGKILL)
        assert [answer.tokens for answer in background.result()] == expected
        assert rollout.counts["discarded"] == had + 4 - 2 * left
    assert [client.lost for client in rollout._clients._clients] == [True, True]


def test_cancelled_answer_is_aborted_on_the_server(tmp_path: Path) -> None:
    """As closing the connection does."""
    server = CannedServer(4, seconds=60)
    with (
        canned_servers(server) as urls,
        HTTPRollout(urls, VLLM(), folder=tmp_path, client_processes=1) as rollout,
    ):

        async def cancel() -> None:
            task = asyncio.create_task(rollout.generate(PROMPT, endless(4)))
            await asyncio.to_thread(wait_until, lambda: server.running == 1)
            before = server.connections
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.to_thread(wait_until, lambda: server.connections < before)

        asyncio.run(cancel())
        # Closing ends what runs.
        background = Background(rollout.generate(PROMPT, endless(4)))
        wait_until(lambda: server.running == 2)
        rollout.close()
        assert background.result()[0].finish_reason == "aborted"


class Closure(VLLM):
    """A dialect whose routes cannot be pickled."""

    async def examine(self, ask: Ask) -> Routes:
        routes = await super().examine(ask)
        routes.abort = lambda name: None  # type: ignore[method-assign]
        return routes


def test_bad_options_are_refused(make_vllm: Make, vllm: Process) -> None:
    with pytest.raises(ValueError, match="client_processes = -1: give at least 0"):
        make_vllm(vllm, client_processes=-1)
    rollout = make_vllm(vllm, dialect=Closure(), client_processes=1)
    with pytest.raises(ValueError, match=r"client_processes: VLLMTokenRoutes cannot be sent .* client_processes=0"):
        run(rollout.generate(PROMPT, endless(4)))


def test_refused_server_is_named_and_leaves_no_thread(make_vllm: Make, vllm: Process) -> None:
    """The contact fails while the processes start."""
    vllm.tell(logprobs_mode="raw_logprobs")
    threads = {thread for thread in threading.enumerate() if thread.name == "rollout-http"}
    with pytest.raises(ValueError, match="raw_logprobs"):
        make_vllm(vllm, client_processes=1)
    wait_until(lambda: {thread for thread in threading.enumerate() if thread.name == "rollout-http"} == threads)
