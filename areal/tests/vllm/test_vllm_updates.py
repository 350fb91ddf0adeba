"""Updates of vLLM's weights: exact versions, nothing lost under load, nothing stale."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from areal.inference.http import HTTPRollout
from areal.tests.harness.limits import promptly
from areal.tests.vllm import server
from areal.tests.vllm.answers import TOLERANCE, Clients, endless, error, prompt, run
from areal.tests.vllm.server import VLLMProcess, replica, weights
from areal.tests.vllm.updates import across_updates, each_version

pytestmark = server.marks


def test_each_version_gives_its_own_log_probs(fresh: HTTPRollout) -> None:
    each_version(fresh, 4)


def test_answers_across_updates_have_the_versions_of_their_tokens(fresh: HTTPRollout) -> None:
    across_updates(fresh)


def test_updates_under_short_requests_lose_nothing(connect: Callable[..., HTTPRollout], vllm: VLLMProcess) -> None:
    """48 clients send requests of four tokens without a break. No update waits for its whole time to drain."""
    rollout = connect(drain_seconds=60)
    rollout.load(vllm.model, 0)
    with Clients(rollout, 48, [4]) as clients:
        for version in range(1, 5):
            clients.wait_for(96)
            with promptly():
                rollout.update(weights(version), version)
        clients.wait_for(96)
    assert not clients.faults
    assert all(len(answer.tokens) == 4 for answer in clients.answers)
    assert {version for answer in clients.answers for version in answer.versions} == set(range(5))
    models = {version: replica(version or None) for version in range(5)}
    few = slice(None, None, max(1, len(clients.answered) // 300))
    assert error(models, clients.prompts[few], clients.answers[few]) <= TOLERANCE


def test_prefixes_of_old_weights_are_not_reused(fresh: HTTPRollout, vllm: VLLMProcess) -> None:
    """The server caches blocks of 128 tokens."""
    given = prompt(5, 400)
    for version in range(3):
        if version:
            fresh.update(weights(version), version)
        answers = []
        for number in range(2):
            hits = vllm.metric("vllm:prefix_cache_hits_total")
            answers += run(fresh.generate(given, endless(20, seed=number)))
            # The first request after an update computes all of its prompt.
            assert vllm.metric("vllm:prefix_cache_hits_total") - hits == (384 if number else 0)
        assert error({version: replica(version or None)}, [given] * 2, answers) <= TOLERANCE


@pytest.mark.parametrize("tokens", [1, 40])
def test_load_of_a_folder_that_other_programs_wrote(
    fresh: HTTPRollout, connect: Callable[..., HTTPRollout], tokens: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("model")
    replica(9).save_pretrained(folder)
    fresh.load(folder, 9)
    answers = run(fresh.generate(prompt(1), endless(tokens)))
    assert answers[0].versions == (9,) * tokens
    assert error({9: replica(9)}, [prompt(1)], answers) <= TOLERANCE
