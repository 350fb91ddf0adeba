"""Judges behind a real server, which fails in stated ways."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from areal.inference.protocol import Completion, Sampling
from areal.tests.harness.limits import PROMPTLY, promptly, wait_until
from areal.tests.unit.rewards.judge_server import JudgeServer, reply
from areal.trainer.rewards import Judge, decoded
from areal.trainer.rewards.judge import UnscoredReply, stated_score
from areal.trainer.rollout import Plan, Runner, SingleTurn

STATED = [("Score: .5", 0.5), ("Score: -.5", -0.5), ("Score: \u22120.5", -0.5), ("Score: 1e-3", 0.001)]


def ask(item: Any, text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Question {item}, answer {text}: write 'Score: ' and a number."}]


def judge_of(server: JudgeServer, **options: Any) -> Judge:
    return Judge(server.url, "judge", ask, **{"backoff_seconds": 0.001, "seconds": PROMPTLY, **options})


def rewards(judge: Judge, *pairs: tuple[Any, str]) -> list[Any]:
    """Return the rewards of items and answers, judged at the same time, or their errors."""

    async def all_of_them() -> list[Any]:
        work = asyncio.gather(*(judge(item, answer) for item, answer in pairs), return_exceptions=True)
        return await asyncio.wait_for(work, PROMPTLY)

    return asyncio.run(all_of_them())


def counts(judge: Judge) -> dict[str, int]:
    return {name: count for name, count in judge.counts.items() if count}


def test_request_and_score() -> None:
    with JudgeServer(text="Fine.\nScore: 0.75") as server:
        judge = judge_of(server, options={"max_tokens": 64}, headers={"Authorization": "Bearer key"})
        assert rewards(judge, (1, "yes")) == [0.75]
        assert server.bodies == [
            {
                "path": "/v1/chat/completions",
                "model": "judge",
                "temperature": 0,
                "max_tokens": 64,
                "messages": ask(1, "yes"),
            }
        ]
        assert server.headers[0]["authorization"] == "Bearer key"
        assert counts(judge) == {"scored": 1, "requests": 1}


@pytest.mark.parametrize("fault", [429, 500, 503, 408, "drop"])
def test_temporary_faults_are_tried_again(fault: Any) -> None:
    with JudgeServer(fault, fault) as server:
        judge = judge_of(server)
        assert rewards(judge, (1, "yes")) == [0.5]
        assert counts(judge) == {"scored": 1, "requests": 3, "retries": 2}


def test_attempts_that_take_too_long_are_tried_again() -> None:
    with JudgeServer("hang") as server, promptly():
        judge = judge_of(server, seconds=0.3)
        assert rewards(judge, (1, "yes")) == [0.5]
        assert counts(judge) == {"scored": 1, "requests": 2, "retries": 1, "timeouts": 1}


def test_server_says_when_to_try_again() -> None:
    with JudgeServer((429, {"Retry-After": "1"})) as server:
        begin = time.monotonic()
        assert rewards(judge_of(server), (1, "yes")) == [0.5]
        assert time.monotonic() - begin >= 1


@pytest.mark.parametrize(
    ("fault", "requests", "words"),
    [
        (503, 3, "no answer in 3 attempts; the last: .*/v1/chat/completions: status 503: .*stated"),
        (400, 1, "status 400: .*stated"),
        (401, 1, "status 401"),
        (reply(None), 1, r"the field 'choices.0.message.content' of the reply does not fit"),
        ({"choices": []}, 1, "the field 'choices'"),
    ],
)
def test_failures_raise_and_are_counted(fault: Any, requests: int, words: str) -> None:
    with JudgeServer(*[fault] * 3) as server:
        judge = judge_of(server, attempts=3)
        (error,) = rewards(judge, (1, "yes"))
        with pytest.raises(RuntimeError, match=words):
            raise error
        assert counts(judge) == {
            k: n for k, n in {"failed": 1, "requests": requests, "retries": requests - 1}.items() if n
        }
        # The failure is not kept.
        server.faults.clear()
        assert rewards(judge, (1, "yes")) == [0.5]


def test_server_that_is_not_there() -> None:
    with JudgeServer() as server:
        url = server.url
    judge = Judge(url, "judge", ask, attempts=2, backoff_seconds=0)
    (error,) = rewards(judge, (1, "yes"))
    assert "in 2 attempts; the last: " + url in str(error)
    assert "ConnectError" in str(error)


def test_reply_without_a_score_raises_and_is_not_kept() -> None:
    with JudgeServer(reply("I like it."), reply("Score: 3"), text="Score: nan") as server:
        judge = judge_of(server, score=lambda text: stated_score(text) if "nan" not in text else float("nan"))
        (error,) = rewards(judge, (1, "yes"))
        assert isinstance(error, UnscoredReply)
        assert "no line has the form 'Score: 0.5'. It answered 'I like it.'" in str(error)
        assert rewards(judge, (1, "yes")) == [3.0]
        (error,) = rewards(judge, (2, "yes"))
        assert "nan is not finite" in str(error)
        assert counts(judge) == {"unscored": 2, "scored": 1, "requests": 3}


def test_equal_requests_are_sent_once() -> None:
    with JudgeServer() as server:
        judge = judge_of(server, cache_size=2)
        assert rewards(judge, *[(1, "yes")] * 4, (2, "yes")) == [0.5] * 5
        assert rewards(judge, (1, "yes")) == [0.5]
        assert (len(server.bodies), judge.counts["cached"]) == (2, 4)
        # A third request takes the place of the one that was used least recently.
        rewards(judge, (3, "yes"))
        rewards(judge, (1, "yes"))
        assert len(server.bodies) == 3
        rewards(judge, (2, "yes"))
        assert len(server.bodies) == 4


def test_cache_can_be_off() -> None:
    with JudgeServer() as server:
        assert rewards(judge_of(server, cache_size=0), *[(1, "yes")] * 3) == [0.5] * 3
        assert len(server.bodies) == 3


def test_cache_file_is_read_by_the_next_judge(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "replies.jsonl"
    with JudgeServer(text="Score: 0.25") as server:
        rewards(judge_of(server, cache_file=file), (1, "yes"), (2, "yes"))
        # The process was killed while it wrote a line.
        file.write_text(file.read_text() + '{"key": "ab')
        with caplog.at_level(logging.WARNING):
            judge = judge_of(server, cache_file=file)
        assert "1 lines are no replies" in caplog.text
        assert rewards(judge, (1, "yes"), (2, "yes"), (3, "yes")) == [0.25] * 3
        assert counts(judge) == {"scored": 3, "cached": 2, "requests": 1}
        assert len(server.bodies) == 3
        assert json.loads(file.read_text().splitlines()[-1])["text"] == "Score: 0.25"


def test_number_of_requests_at_once_is_limited() -> None:
    with JudgeServer() as server:
        server.meeting = threading.Barrier(3)
        assert rewards(judge_of(server, concurrency=3), *((i, "yes") for i in range(9))) == [0.5] * 9
        assert server.most == 3


def test_cancelled_episode_frees_its_place() -> None:
    with JudgeServer("hang") as server:
        judge = judge_of(server, concurrency=1)

        async def cancel_one() -> list[float]:
            first = asyncio.ensure_future(judge(1, "yes"))
            await asyncio.to_thread(wait_until, lambda: len(server.bodies) == 1)
            waiting = [asyncio.ensure_future(judge(item, "yes")) for item in (1, 2)]
            first.cancel()
            return await asyncio.wait_for(asyncio.gather(*waiting), PROMPTLY)

        assert asyncio.run(cancel_one()) == [0.5, 0.5]
        assert counts(judge) == {"scored": 2, "requests": 3}


def test_closed_judge_has_no_connection_and_can_be_used_again() -> None:
    with JudgeServer() as server:
        judge = judge_of(server)
        for item in (1, 2):
            assert rewards(judge, (item, "yes")) == [0.5]
            assert judge._client is not None
            judge.close()
            wait_until(lambda: judge._client is None)


def test_thread_ends_with_the_judge() -> None:
    with JudgeServer() as server:
        judge = judge_of(server)
        rewards(judge, (1, "yes"))
        thread = judge._thread
        assert thread.is_alive()
        del judge
        thread.join(PROMPTLY)
        assert not thread.is_alive()


class Client:
    """Samples the prompt's token."""

    version = 0

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        return Completion((prompt_ids[0],), (-1.0,), (0,), "stop")


class Digits:
    """A tokenizer of digits."""

    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> str:
        return "".join(map(str, token_ids))


def test_judge_is_the_reward_of_an_episode() -> None:
    """The runner counts a failure. Its close closes the connections of the judge."""
    with JudgeServer(400) as server:
        judge = judge_of(server, text=decoded(Digits()), concurrency=1)
        runner = Runner(Client(), SingleTurn(lambda item: [item], judge, Sampling()), range(3), Plan(3, shuffle=False))
        try:
            runner.advance(0)
            groups = runner.next_batch(timeout=60)
        finally:
            runner.close()
        assert sorted(group.failed for group in groups) == [0, 0, 1]
        assert {body["messages"][0]["content"] for body in server.bodies} == {
            ask(i, str(i))[0]["content"] for i in range(3)
        }
        wait_until(lambda: judge._client is None)


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("Score: 1", 1.0),
        ("score = -0.5.", -0.5),
        ("Score: 2\nnow\n**Score:** 7", 7.0),
        ("SCORE: 0.25\n", 0.25),
        *STATED,
    ],
)
def test_stated_score(text: str, score: float) -> None:
    assert stated_score(text) == score


@pytest.mark.parametrize(
    "text", ["", "scores: 3", "Score: high", "Score: 7/10", "0.5", "Score: 0,5", "Score: 1. Score: 85 %"]
)
def test_text_without_a_stated_score(text: str) -> None:
    with pytest.raises(ValueError, match="no line has the form"):
        stated_score(text)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"url": "localhost:8000"}, "Judge.url = 'localhost:8000'"),
        ({"url": "http://localhost:8000/v1/"}, "without '/v1'"),
        ({"concurrency": 0}, "Judge.concurrency = 0"),
        ({"attempts": 0}, "Judge.attempts = 0"),
        ({"seconds": 0}, "Judge.seconds = 0"),
        ({"backoff_seconds": -1}, "Judge.backoff_seconds = -1"),
        ({"cache_size": -1}, "cache_size = -1"),
        ({"cache_size": 0, "cache_file": "x"}, "cache_size = 0"),
    ],
)
def test_bad_input_is_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Judge(**{"url": "http://localhost:8000", "model": "judge", "messages": ask, **options})
