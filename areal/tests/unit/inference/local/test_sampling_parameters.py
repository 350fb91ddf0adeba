"""Sampling parameters in samples, and what the trainer says about those that it cannot apply."""

import asyncio
import collections.abc
import logging
from contextlib import nullcontext

import pytest

from areal.api import TrainEngineConfig
from areal.inference.protocol import Completion, Sampling
from areal.trainer.rollout.plan import Group
from areal.trainer.rollout.report import RolloutReport
from areal.trainer.rollout.sampling_check import SamplingCheck
from areal.trainer.rollout.seeded import SeededClient
from areal.trainer.rollout.sequence import Sequence
from areal.utils.data import Segment


def answer(sampling: Sampling | None) -> Completion:
    return Completion((7, 8), (-0.5, -1.5), (3, 3), "stop", sampling)


def sequence(*samplings: Sampling | None) -> Sequence:
    turns = [part for each in samplings for part in (Segment([5], trainable=False), answer(each).segment())]
    return Sequence(tuple(turns), reward=1.0)


@pytest.mark.parametrize(("temperature", "applied"), [(0.5, 0.5), (1.0, 1.0), (0.0, 1.0)])
def test_sample_has_temperature_of_its_answers(temperature: float, applied: float) -> None:
    """Also after a checkpoint. Log-probs of greedy answers are those at temperature 1."""
    made = sequence(Sampling(temperature=temperature), Sampling(temperature=temperature, top_p=0.9))
    for each in (made, Sequence.of_state(made.state())):
        assert each.sample()["temperature"].item() == applied
        assert [dict(s.sampling) for s in each.segments if s.trainable] == [
            {"temperature": temperature, "top_p": 1.0, "top_k": 0},
            {"temperature": temperature, "top_p": 0.9, "top_k": 0},
        ]


def test_sample_of_unknown_or_several_temperatures() -> None:
    assert "temperature" not in sequence(None).sample()
    state = sequence(Sampling(temperature=0.5)).state()
    for segment in state["segments"]:
        segment.pop("sampling")  # as saved by earlier releases
    assert "temperature" not in Sequence.of_state(state).sample()
    with pytest.raises(ValueError, match=r"temperatures \[0.5, 1.0\]"):
        sequence(Sampling(temperature=0.5), Sampling()).sample()


def test_runner_records_parameters_that_a_client_does_not() -> None:
    class Client:
        version = 0

        async def generate(self, prompt_ids: collections.abc.Sequence[int], sampling: Sampling) -> Completion:
            return answer(None)

    recorded = asyncio.run(SeededClient(Client(), (1,)).generate([5], Sampling(temperature=0.25))).sampling
    assert recorded is not None
    assert recorded.temperature == 0.25


def test_report_collects_parameters_of_trained_answers() -> None:
    group = Group(0, (sequence(Sampling(top_p=0.5)), sequence(None)))
    report = RolloutReport([group], max_tokens=None, version=3)
    report.reduce(lambda x: x)
    assert report.samplings == {(("temperature", 1.0), ("top_p", 0.5), ("top_k", 0))}


@pytest.mark.parametrize(
    ("sampling", "text"),
    [
        (Sampling(top_p=0.6), "Sampling.top_p = 0.6: tokens were excluded"),
        (Sampling(top_k=4), "Sampling.top_k = 4: tokens were excluded"),
        (Sampling(temperature=0), "Sampling.temperature = 0: answers are greedy"),
        (Sampling(temperature=0.3), None),
    ],
)
def test_excluded_tokens_and_greedy_answers_are_warned_of_once(
    sampling: Sampling, text: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    for warns in (True, False):
        check = SamplingCheck(TrainEngineConfig(path="model"), recompute_logprobs=True, warns=warns)
        for _ in range(2):
            check([tuple(sampling.distribution().items())])
        assert [text in message for message in caplog.messages if text] == [True] * (warns and text is not None)
        assert text or not caplog.messages
        caplog.clear()


@pytest.mark.parametrize(
    ("sampling", "options", "error"),
    [
        (Sampling(), {"temperature": 0.5}, r"TrainEngineConfig.temperature = 0.5.*sampled at temperature 1.0"),
        (Sampling(temperature=0.5), {"temperature": 1.0}, r"TrainEngineConfig.temperature = 1.0.*temperature 0.5"),
        (Sampling(temperature=0), {"temperature": 0.5}, r"TrainEngineConfig.temperature = 0.5.*temperature 0"),
        (Sampling(temperature=0), {"temperature": 1.0}, None),
        (Sampling(temperature=0.5), {"temperature": 0.5}, None),
        (Sampling(temperature=0.5), {}, None),
        (Sampling(top_k=3), {}, r"Sampling.top_k = 3 with Updates.recompute_logprobs = False"),
        (Sampling(top_p=0.5), {}, r"Sampling.top_p = 0.5 with Updates.recompute_logprobs = False"),
    ],
)
def test_parameters_that_the_trainer_cannot_apply_are_refused(
    sampling: Sampling, options: dict[str, float], error: str | None
) -> None:
    check = SamplingCheck(TrainEngineConfig(path="model", **options), recompute_logprobs=False, warns=False)
    with nullcontext() if error is None else pytest.raises(ValueError, match=error):
        check([tuple(sampling.distribution().items())])
