"""Episodes of agent programs, which know a base URL only."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import httpx2
import pytest

from areal.inference.gateway import AgentProgram, Gateway
from areal.inference.protocol import Sampling
from areal.tests.harness.limits import PROMPTLY, promptly
from areal.tests.unit.inference.gateway.programs import USER, Model, ask, run, tokenizer, written
from areal.trainer.rollout import Plan, Runner, Sequence
from areal.trainer.rollout.agent_episode import AgentEpisode

ITEM = {"question": "What is 2+2?", "answer": "4"}
PROGRAM = """
import json, os, sys, urllib.request
item = json.load(sys.stdin)
body = {"messages": [{"role": "user", "content": item["question"]}]}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
                                 {"Content-Type": "application/json"})
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"], end="")
"""


async def two_turns(base_url: str, item: dict[str, Any]) -> str:
    """Ask twice, and return the last answer."""
    async with httpx2.AsyncClient(base_url=base_url, timeout=PROMPTLY) as http:
        first = await ask(http, USER)
        last = await ask(http, USER, first["choices"][0]["message"], {"role": "user", "content": "Sure?"})
    return str(last["choices"][0]["message"]["content"])


def exact(item: dict[str, Any], result: str) -> float:
    return float(result == item["answer"])


def episode(agent: Any, reward: Any = exact, **options: Any) -> AgentEpisode:
    return AgentEpisode(Gateway(tokenizer(), Sampling(64)), agent, reward, **options)


def play(made: AgentEpisode, model: Model) -> list[Sequence]:
    async def once() -> list[Sequence]:
        async with made:
            return await asyncio.wait_for(made.run(model, ITEM), PROMPTLY)

    try:
        return asyncio.run(once())
    finally:
        made.close()


def test_turns_of_an_agent_are_one_sequence_with_its_reward() -> None:
    model = Model(written("5"), written("4"))
    (sequence,) = play(episode(two_turns), model)
    assert sequence.reward == 1
    assert sequence.stats == {"requests": 2, "refused": 0, "sequences": 1}
    assert [list(each.tokens) for each in sequence.segments if each.trainable] == list(model.answers)


def test_function_that_blocks_runs_in_a_thread() -> None:
    def agent(base_url: str, item: dict[str, Any]) -> str:
        body = {"messages": [USER]}
        reply = httpx2.post(f"{base_url}/chat/completions", json=body, timeout=PROMPTLY)
        assert threading.current_thread() is not threading.main_thread()
        return str(reply.json()["choices"][0]["message"]["content"])

    (sequence,) = play(episode(agent), Model(written("4")))
    assert sequence.reward == 1


def test_program_finds_its_endpoint_in_the_environment() -> None:
    (sequence,) = play(episode(AgentProgram([sys.executable, "-c", PROGRAM])), Model(written("4")))
    assert sequence.reward == 1


def test_program_that_fails_names_its_last_words() -> None:
    program = AgentProgram([sys.executable, "-c", "import sys; sys.exit('no such tool')"])
    with pytest.raises(RuntimeError, match="exit code 1: no such tool"):
        play(episode(program), Model(written("4")))


def test_program_and_its_children_end_at_the_time_limit(tmp_path: Path) -> None:
    code = f"""
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(tmp_path / "pids")!r}, "w").write(f"{{os.getpid()}} {{child.pid}}")
time.sleep(600)
"""
    program = AgentProgram([sys.executable, "-c", code], seconds=3.0)
    with pytest.raises(TimeoutError, match="took longer than 3 s"):
        play(episode(program), Model(written("4")))
    for pid in (tmp_path / "pids").read_text().split():
        with pytest.raises(ProcessLookupError):
            _wait_for_end(int(pid))


def test_program_has_ended_although_its_children_run() -> None:
    program = AgentProgram(["sh", "-c", "sleep 600 & echo $!"])
    with promptly():
        child = int(asyncio.run(program("http://nowhere", ITEM)))
    with pytest.raises(ProcessLookupError):
        _wait_for_end(child)


def _wait_for_end(pid: int) -> None:
    """Return while a process runs; raise ``ProcessLookupError`` once it has ended. A zombie of an orphan has ended, too."""
    for _ in range(200):
        os.kill(pid, 0)
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            raise ProcessLookupError
        threading.Event().wait(0.05)


def test_agent_that_asks_nothing_fails_its_episode() -> None:
    with pytest.raises(ValueError, match="no answer from its base_url; requests: none"):
        play(episode(lambda base_url, item: "4"), Model(written("4")))


def test_requests_after_the_limit_are_refused_and_counted() -> None:
    async def agent(base_url: str, item: dict[str, Any]) -> str:
        async with httpx2.AsyncClient(base_url=base_url, timeout=PROMPTLY) as http:
            replies = [await http.post("/chat/completions", json={"messages": [USER]}) for _ in range(3)]
        return json.dumps([reply.status_code for reply in replies])

    (sequence,) = play(
        episode(agent, lambda item, result: float(result == "[200, 410, 410]"), max_requests=1), Model(written("4"))
    )
    assert sequence.reward == 1
    assert sequence.stats["refused"] == 2


def test_runner_serves_while_it_runs_and_counts_failures() -> None:
    seen: list[str] = []

    async def agent(base_url: str, item: dict[str, Any]) -> str:
        seen.append(base_url)
        if item["answer"] == "none":
            raise RuntimeError("the agent is lost")
        return await two_turns(base_url, item)

    made = episode(agent)
    items = [ITEM, {"question": "?", "answer": "none"}]
    runner = Runner(Model(written("4")), made, items, Plan(groups=2, group_size=3, max_staleness=0, shuffle=False))
    runner.advance(0)
    good, bad = runner.next_batch(PROMPTLY)
    runner.close()
    assert len(good.sequences) == 3
    assert bad.failed == 3
    assert "the agent is lost" in str(bad.error)
    assert len(set(seen)) == 6
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(f"{seen[0]}/models", timeout=PROMPTLY)


def test_gateway_that_cannot_serve_fails_the_run() -> None:
    made = AgentEpisode(Gateway(tokenizer(), Sampling(64), host="192.0.2.1"), two_turns, exact)
    runner = Runner(Model(written("4")), made, [ITEM], Plan(groups=1, group_size=1))
    runner.advance(0)
    with pytest.raises(RuntimeError, match="could not be played"):
        runner.next_batch(PROMPTLY)
    runner.close()


def test_cancelled_episode_ends_its_session() -> None:
    async def work() -> None:
        model = Model()
        urls: list[str] = []

        async def agent(base_url: str, item: dict[str, Any]) -> str:
            urls.append(base_url)
            return await two_turns(base_url, item)

        made = episode(agent)
        async with made:
            task = asyncio.ensure_future(made.run(model, ITEM))
            while not model.prompts:
                await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.wait({task})
            reply = await asyncio.to_thread(
                httpx2.post, f"{urls[0]}/chat/completions", json={"messages": [USER]}, timeout=PROMPTLY
            )
            assert (reply.status_code, reply.json()["error"]["code"]) == (410, "session_ended")
        assert model.cancelled == 1
        made.close()

    run(work)
