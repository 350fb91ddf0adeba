"""Harnesses of the published package, unmodified, in front of a model that has learned to use their tools."""

from __future__ import annotations

import asyncio
import importlib.metadata
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verifiers", reason="verifiers is not installed: make test-agents")

from areal.inference import VLLM, HTTPRollout, LocalRollout
from areal.inference.protocol import Completion, Sampling
from areal.tests.agents.pupil import Pupil
from areal.tests.agents_verifiers.pupil import episode, play, taught, token_client, untaught, write_model
from areal.tests.harness.servers.rollout_http import Process

REPEATS = 5
MANY = 200
RELEASE = importlib.metadata.version("verifiers")


@pytest.mark.parametrize(
    ("harness", "tokens"), [("null", False), ("bash", False), ("null", True), ("bash", True)], ids=str
)
def test_three_turns_train_on_the_tokens_that_were_sampled(
    harness: str, tokens: bool, tmp_path: Path, report: Callable[..., None]
) -> None:
    write_model(tmp_path)
    client = token_client(tmp_path) if tokens else None
    pupil = taught(tmp_path, harness, client)
    groups = play(pupil.rollout, episode(harness, client), group_size=REPEATS)
    sequences = [each for group in groups for each in group.sequences]
    worst = pupil.error(sequences)
    report(f"verifiers {RELEASE}, {harness}, {'tokens' if tokens else 'messages'}", 3 * REPEATS, sequences, worst)
    assert worst < 1e-5
    # The model has learned the loop: most runs are right, with two calls and an answer in one sequence.
    right = [each for each in sequences if each.reward == 1.0]
    assert len(right) > len(sequences) / 2
    for each in right:
        assert [segment.trainable for segment in each.segments] == [False, True] * 3
        assert each.stats["calls"] == 2
        assert each.stats["sequences"] == 1
    pupil.close()


def test_servers_generate_by_the_token_route(tmp_path: Path, report: Callable[..., None]) -> None:
    write_model(tmp_path)
    pupil = untaught(tmp_path)
    process = Process(str(tmp_path), modern=True)
    try:
        with HTTPRollout([process.url], VLLM(), folder=tmp_path / "weights", model=str(tmp_path)) as rollout:
            rollout.update(pupil.engine.named_tensors(), 1)
            groups = play(rollout, episode("null", token_client(tmp_path)), group_size=2)
    finally:
        process.kill()
    sequences = [each for group in groups for each in group.sequences]
    worst = pupil.error(sequences)
    report(f"verifiers {RELEASE}, null, tokens, HTTPRollout", len(sequences), sequences, worst)
    assert worst < 1e-5
    pupil.close()


class Updating:
    """Updates the weights after each answer."""

    version = 0

    def __init__(self, pupil: Pupil) -> None:
        self._pupil = pupil

    async def generate(self, prompt_ids: Any, sampling: Sampling) -> Completion:
        rollout = self._pupil.rollout
        answer = await rollout.generate(prompt_ids, sampling)
        rollout.update(self._pupil.engine.named_tensors(), rollout.version + 1)
        return answer


@pytest.mark.parametrize("tokens", [False, True], ids=["messages", "tokens"])
def test_update_in_mid_episode_keeps_versions_per_token(tokens: bool, tmp_path: Path) -> None:
    write_model(tmp_path)
    client = token_client(tmp_path) if tokens else None
    pupil = taught(tmp_path, "bash", client)
    (group,) = play(Updating(pupil), episode("bash", client), groups=1)
    (sequence,) = group.sequences
    versions = [set(each.values["versions"].tolist()) for each in sequence.segments if each.trainable]
    assert len(versions) >= 2
    assert versions == [{1 + number} for number in range(len(versions))]
    assert pupil.error([sequence]) < 1e-5
    pupil.close()


class Together:
    """Generates once all runs have asked."""

    version = 0

    def __init__(self, rollout: LocalRollout) -> None:
        self._rollout = rollout
        self._all: asyncio.Barrier | None = None

    async def generate(self, prompt_ids: Any, sampling: Sampling) -> Completion:
        self._all = self._all or asyncio.Barrier(MANY)
        await self._all.wait()
        return await self._rollout.generate(prompt_ids, sampling)


@pytest.mark.timeout(900)
def test_many_episodes_at_once(tmp_path: Path, report: Callable[..., None]) -> None:
    write_model(tmp_path)
    pupil = untaught(tmp_path)
    started = time.monotonic()
    groups = play(Together(pupil.rollout), episode("null", tools=False), groups=1, group_size=MANY, seconds=800)
    seconds = time.monotonic() - started
    sequences = [each for group in groups for each in group.sequences]
    worst = pupil.error(sequences)
    report(f"verifiers {RELEASE}, null, {seconds:.0f} s for all at once", MANY, sequences, worst)
    assert len(sequences) == MANY
    assert worst < 1e-5
    pupil.close()
