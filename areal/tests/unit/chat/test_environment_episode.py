"""Episodes in an environment: games, their limits, their faults, and their end."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from areal.chat import Chat, ParsedAnswer
from areal.inference.protocol import Sampling
from areal.tests.harness.limits import PROMPTLY, promptly, wait_until
from areal.tests.unit.chat import templates
from areal.tests.unit.chat.agents import Scripted, answer_of, chat_of
from areal.trainer.rollout import Plan, Runner, Sequence
from areal.trainer.rollout.environment_episode import EnvironmentEpisode, Step


class Guess:
    """A game: find the item's number. Each guess costs 0.1, the right one is worth 1."""

    made: list[Guess]

    def __init__(self) -> None:
        self.closed, self.answers = 0, list[ParsedAnswer]()
        self.made.append(self)

    def reset(self, item: int) -> list[dict[str, Any]]:
        self.number = item
        return [{"role": "user", "content": "Guess."}]

    def step(self, answer: ParsedAnswer) -> Step:
        self.answers.append(answer)
        if answer.content == str(self.number):
            return Step(reward=0.9, done=True)
        return Step([{"role": "user", "content": "No."}], reward=-0.1)

    def close(self) -> None:
        self.closed += 1


class Later(Guess):
    """The same game with coroutines."""

    async def reset(self, item: int) -> list[dict[str, Any]]:  # type: ignore[override]
        await asyncio.sleep(0)
        assert threading.current_thread().name != "environment"
        return super().reset(item)

    async def step(self, answer: ParsedAnswer) -> Step:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().step(answer)

    async def close(self) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        super().close()


@pytest.fixture(autouse=True)
def no_games() -> None:
    Guess.made = []


def episode(
    make: Callable[[], Any] = Guess, sampling: Sampling | None = None, **options: Any
) -> tuple[Chat, EnvironmentEpisode]:
    chat = chat_of(templates.CHATML)
    return chat, EnvironmentEpisode(chat, make, sampling or Sampling(64), **options)


def answers(chat: Chat, *texts: str) -> Scripted:
    return Scripted(*(answer_of(chat, {"content": text}) for text in texts))


def play(made: EnvironmentEpisode, client: Any, item: Any = 7) -> Sequence:
    (sequence,) = asyncio.run(asyncio.wait_for(made.run(client, item), PROMPTLY))
    made.close()
    return sequence


@pytest.mark.parametrize("make", [Guess, Later])
def test_game_is_played_until_it_is_done(make: Callable[[], Any]) -> None:
    chat, made = episode(make)
    client = answers(chat, "5", "9", "7", "8")
    sequence = play(made, client)
    assert sequence.reward == pytest.approx(0.9 - 0.2)
    assert sequence.stats == {"turns": 3, "done": 1}
    assert not sequence.truncated
    assert [answer.content for answer in Guess.made[0].answers] == ["5", "9", "7"]
    text = chat.template.tokenizer.decode(client.requests[-1][0])
    assert text.count("<|im_start|>user\nNo.<|im_end|>\n<|im_start|>assistant\n") == 2
    assert [list(each.tokens) for each in sequence.segments if each.trainable] == list(client.answers[:3])
    assert [game.closed for game in Guess.made] == [1]


@pytest.mark.parametrize(("limits", "turns"), [({"max_turns": 3}, 3), ({"max_tokens": 3}, 2)])
def test_limits_end_a_game(limits: dict[str, int], turns: int) -> None:
    """The last answer has a step, too. An answer has two tokens: a digit and its end."""
    chat, made = episode(**limits)
    client = answers(chat, "5")
    sequence = play(made, client)
    assert sequence.stats == {"turns": turns, "done": 0}
    assert sequence.reward == pytest.approx(-0.1 * turns)
    assert len(client.requests) == len(Guess.made[0].answers) == turns
    if "max_tokens" in limits:
        assert [sampling.max_new_tokens for _, sampling in client.requests] == [3, 1]


def test_incomplete_answer_is_the_last_step() -> None:
    chat, made = episode()
    sequence = play(made, Scripted(answer_of(chat, {"content": "7"})[:-1]))
    assert sequence.truncated
    assert (sequence.reward, sequence.stats) == (0.9, {"turns": 1, "done": 1})
    assert not Guess.made[0].answers[0].complete


def test_each_episode_has_its_own_environment() -> None:
    chat, made = episode()

    async def both() -> list[list[Sequence]]:
        return await asyncio.gather(*(made.run(answers(chat, "5", str(item)), item) for item in (1, 2)))

    assert [sequence.reward for (sequence,) in asyncio.run(both())] == pytest.approx([0.8, 0.8])
    assert sorted(game.number for game in Guess.made) == [1, 2]


class Breaks(Guess):
    """An environment that raises, or returns something else than a step."""

    def step(self, answer: ParsedAnswer) -> Any:
        if answer.content == "raise":
            raise KeyError("no such room")
        return Step() if answer.content == "nothing" else ("text", 1.0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("raise", "KeyError: 'no such room'"),
        ("nothing", "ValueError: step returned no messages and done = False"),
        ("tuple", r"ValueError: step returned \('text', 1.0\): it must return a Step"),
    ],
)
def test_environment_that_fails_is_named_counted_and_closed(text: str, words: str) -> None:
    chat, made = episode(Breaks)
    runner = Runner(answers(chat, text), made, [7], Plan(1, group_size=2))
    try:
        runner.advance(0)
        (group,) = runner.next_batch(timeout=60)
    finally:
        runner.close()
    assert group.failed == 2
    assert group.error is not None
    assert re.match(words, group.error)
    assert [game.closed for game in Guess.made] == [1, 1]


class Hangs(Guess):
    """A game whose step waits until the test ends it."""

    end: threading.Event
    inside: threading.Event

    def step(self, answer: ParsedAnswer) -> Step:
        self.inside.set()
        self.end.wait(2 * PROMPTLY)
        assert not self.closed, "closed while a step was running"
        return super().step(answer)


@pytest.fixture
def hanging() -> type[Hangs]:
    Hangs.end, Hangs.inside = threading.Event(), threading.Event()
    return Hangs


def test_environment_that_hangs_fails_its_episode(hanging: type[Hangs]) -> None:
    """The thread is replaced. The environment is closed when its step returns."""
    chat, made = episode(hanging, seconds=0.3, workers=2)
    with promptly(), pytest.raises(TimeoutError, match=r"the call of 'step' of an environment took longer than 0.3 s"):
        play(made, answers(chat, "5"))
    assert not Guess.made[0].closed
    hanging.end.set()
    wait_until(lambda: Guess.made[0].closed == 1)
    assert play(made, answers(chat, "7")).reward == 0.9


def test_environment_does_not_hold_up_the_event_loop(hanging: type[Hangs]) -> None:
    chat, made = episode(hanging)

    async def run() -> list[Sequence]:
        playing = asyncio.ensure_future(made.run(answers(chat, "7"), 7))
        while not hanging.inside.is_set():
            await asyncio.sleep(0.001)
        hanging.end.set()
        return await asyncio.wait_for(playing, PROMPTLY)

    assert asyncio.run(run())[0].reward == 0.9


def test_cancelled_episode_closes_its_environment(hanging: type[Hangs], monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the run does not wait for a step that hangs."""
    monkeypatch.setattr("areal.trainer.rollout.environment_episode._CLOSE_SECONDS", 0.2)
    chat, made = episode(hanging)
    runner = Runner(answers(chat, "5"), made, [7], Plan(1))
    runner.advance(0)
    assert hanging.inside.wait(PROMPTLY)
    with promptly():
        runner.close()
    hanging.end.set()
    wait_until(lambda: Guess.made[0].closed == 1)


def test_environment_is_closed_if_other_calls_are_before(hanging: type[Hangs], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal.trainer.rollout.environment_episode._CLOSE_SECONDS", 0.1)
    chat, made = episode(hanging, workers=1)

    class Silent:
        async def generate(self, *_: Any) -> Any:
            await asyncio.Event().wait()

    async def run() -> None:
        waiting: Any = asyncio.ensure_future(made.run(Silent(), 7))  # type: ignore[arg-type]
        while not Guess.made:
            await asyncio.sleep(0.001)
        busy = asyncio.ensure_future(made.run(answers(chat, "7"), 7))
        while not hanging.inside.is_set():
            await asyncio.sleep(0.001)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(waiting, PROMPTLY)
        hanging.end.set()
        await asyncio.wait_for(busy, PROMPTLY)

    asyncio.run(run())
    wait_until(lambda: [game.closed for game in Guess.made] == [1, 1], "both are closed", 10.0)


def test_environment_that_cannot_be_made_or_closed() -> None:
    def no_display() -> Guess:
        raise OSError("no display")

    class Stays(Guess):
        def close(self) -> None:
            raise OSError("still open")

    chat, made = episode(no_display)
    with pytest.raises(OSError, match="no display"):
        play(made, answers(chat, "7"))
    chat, made = episode(Stays)
    with pytest.raises(OSError, match="still open"):
        play(made, answers(chat, "7"))


def test_bad_limits_are_named() -> None:
    for options, words in (
        ({"max_turns": 0}, "max_turns = 0"),
        ({"max_tokens": 0}, "max_tokens = 0"),
        ({"seconds": 0}, "EnvironmentPool.seconds = 0"),
        ({"workers": 0}, "EnvironmentPool.workers = 0"),
        (
            {"sampling": Sampling(64, stop=("</tool_call>",))},
            r"Sampling.stop = \('</tool_call>',\): an answer of a chat ends",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            episode(**options)


class Resets(Guess):
    """A game whose first reset takes as long as the item says."""

    def reset(self, item: Any) -> Any:
        time.sleep(item)
        return super().reset(7)


class ResetsAndClosesLater(Resets):
    async def close(self) -> None:  # type: ignore[override]
        self.closed += 1


@pytest.mark.parametrize("kind", [Resets, ResetsAndClosesLater])
def test_environment_whose_close_waits_for_another_call_is_closed(
    kind: type[Guess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An episode that is over is cancelled while its close is in the queue; one that fails gives up waiting for it."""
    monkeypatch.setattr("areal.trainer.rollout.environment_episode._CLOSE_SECONDS", 0.1)
    chat, made = episode(kind, workers=1)

    async def run() -> None:
        first = asyncio.ensure_future(made.run(answers(chat, "7"), 0))
        while not Guess.made:
            await asyncio.sleep(0.001)
        busy = asyncio.ensure_future(made.run(answers(chat, "7"), 1.0))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(first, 0.3)
        await asyncio.wait_for(busy, PROMPTLY)
        await asyncio.sleep(0.2)

    asyncio.run(run())
    wait_until(lambda: [game.closed for game in Guess.made] == [1, 1], "both are closed", 10.0)


def test_close_that_hangs_takes_one_worker_for_no_longer_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal.trainer.rollout.environment_episode._CLOSE_SECONDS", 0.1)
    end = threading.Event()

    class Stuck(Guess):
        def close(self) -> None:
            end.wait(2 * PROMPTLY)

    chat, made = episode(Stuck, workers=2, seconds=0.3)
    for _ in range(3):
        with (
            promptly(),
            pytest.raises(TimeoutError, match=r"the call of 'close' of an environment took longer than 0.3 s"),
        ):
            play(made, answers(chat, "7"))
    end.set()
