"""Agents, attempts and failures of an episode, and options that are refused."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("verifiers", reason="verifiers is not installed: make test-agents")
import verifiers.v1 as vf

import areal.integrations.verifiers.episode
from areal.inference.gateway import Gateway
from areal.inference.protocol import Completion, Sampling
from areal.integrations.verifiers import VerifiersEpisode
from areal.tests.agents_verifiers.pupil import Oracle, environment, episode, play, tokenizer
from areal.trainer.rollout import Plan, Runner
from areal.trainer.rollout.sequence import Sequence


def gateway(**options: Any) -> Gateway:
    return Gateway(tokenizer(), Sampling(96), **options)


def text(sequence: Sequence) -> str:
    """Return what is trained in a sequence."""
    tokens = [int(token) for each in sequence.segments if each.trainable for token in each.tokens]
    return str(tokenizer().decode(tokens))


class Moody(Oracle):
    """Answers rightly, then wrongly, and so on."""

    count = 0

    def message(self, results: list[str], a: str, b: str, c: str) -> dict[str, Any]:
        message = super().message(results, a, b, c)
        if "content" in message:
            self.count += 1
            message = message if self.count % 2 else {"content": "It is 0."}
        return message


class Failing(Oracle):
    """Refuses a number of second turns."""

    def __init__(self, harness: str, times: int) -> None:
        super().__init__(harness)
        self._times = times

    async def generate(self, prompt_ids: Any, sampling: Sampling) -> Completion:
        answer = await super().generate(prompt_ids, sampling)
        if "</tool_call>" in tokenizer().decode(list(prompt_ids)) and self._times:
            self._times -= 1
            raise ValueError("no second turn")
        return answer


def test_each_agent_has_its_own_reward() -> None:
    config = {**environment("bash"), "id": "best-of-n", "n": 2}
    (group,) = play(Moody("bash"), VerifiersEpisode(config, gateway()), groups=1)
    assert sorted((each.reward, text(each).endswith("It is 9.<|im_end|>")) for each in group.sequences) == [
        (0.0, False),
        (1.0, True),
    ]
    assert {each.episode for each in group.sequences} == {0}


def test_agent_that_is_not_trainable_is_left_out() -> None:
    agent = environment("bash")["agent"]
    config = {"id": "areal_pair", "taskset": environment("bash")["taskset"], "solver": agent, "judge": agent}
    (group,) = play(Moody("bash"), VerifiersEpisode(config, gateway()), groups=1)
    assert [text(each).endswith("It is 9.<|im_end|>") for each in group.sequences] == [True]


def test_repeated_attempt_alone_is_trained() -> None:
    config = environment("bash")
    config["agent"]["retries"] = {"max_retries": 1}
    (group,) = play(Failing("bash", 1), VerifiersEpisode(config, gateway()), groups=1)
    assert [sum(segment.trainable for segment in each.segments) for each in group.sequences] == [3]


def test_limit_of_turns_ends_an_episode_that_is_trained() -> None:
    config = environment("bash")
    config["agent"]["max_turns"] = 2
    (group,) = play(Oracle("bash"), VerifiersEpisode(config, gateway()), groups=1)
    (sequence,) = group.sequences
    assert sum(segment.trainable for segment in sequence.segments) == 2
    assert (sequence.reward, sequence.truncated) == (0.0, True)


def test_error_of_an_agent_fails_the_episode_with_its_text() -> None:
    made = episode("bash")
    runner = Runner(Failing("bash", 9), made, made.tasks(), Plan(1, 1))
    runner.advance(0)
    (group,) = runner.next_batch(120)
    runner.close()
    assert group.failed == 1
    assert "no second turn" in str(group.error)


def test_refused_sampling_names_the_option() -> None:
    made = VerifiersEpisode(environment("bash"), gateway(), sampling=vf.Sampling(temperature=0.0))
    runner = Runner(Oracle("bash"), made, made.tasks(), Plan(1, 1))
    runner.advance(0)
    (group,) = runner.next_batch(120)
    runner.close()
    assert "temperature = 0" in str(group.error)


def test_environment_that_cannot_start_ends_the_run() -> None:
    made = VerifiersEpisode(environment("bash"), gateway(host="192.0.2.1"))
    runner = Runner(Oracle("bash"), made, made.tasks(), Plan(1, 1))
    runner.advance(0)
    with pytest.raises(RuntimeError, match="assign requested address"):
        runner.next_batch(60)
    runner.close()


def test_options_without_effect_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = vf.EvalClientConfig(base_url="http://elsewhere/v1")
    with pytest.raises(ValueError, match=r"client\.base_url = 'http://elsewhere/v1'"):
        VerifiersEpisode(environment("bash"), gateway(), client=elsewhere)
    config = environment("bash")
    config["agent"]["client"] = {"type": "eval", "base_url": "http://elsewhere/v1"}
    with pytest.raises(ValueError, match=r"agent\.client"):
        VerifiersEpisode(config, gateway())
    made = episode("bash")
    monkeypatch.setattr(type(made.environment.taskset), "INFINITE", True)
    with pytest.raises(ValueError, match="Sums is infinite"):
        made.tasks()


def test_untested_release_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(areal.integrations.verifiers.episode.verifiers, "__version__", "0.5.0")
    with pytest.warns(UserWarning, match=r"verifiers 0\.5\.0"):
        episode("bash")
