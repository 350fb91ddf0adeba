"""Updates of SGLang's weights: exact versions, nothing lost, loads that fail, and a server that is started anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal.inference.http import HTTPRollout, SGLang
from areal.tests.harness.limits import wait_until
from areal.tests.sglang import server
from areal.tests.sglang.server import SGLangProcess
from areal.tests.vllm.answers import TOLERANCE, Clients, endless, error, prompt, run
from areal.tests.vllm.exchanges import folders
from areal.tests.vllm.server import replica, weights
from areal.tests.vllm.updates import each_version

pytestmark = server.marks


def test_each_version_gives_its_own_log_probs(fresh: HTTPRollout) -> None:
    each_version(fresh, 3)


def test_answers_across_updates_are_one_request_with_the_versions_of_their_tokens(
    fresh: HTTPRollout, sglang: SGLangProcess
) -> None:
    before = sglang.asked("/generate")
    with Clients(fresh, 8, range(100, 260, 20)) as clients:
        for version in (1, 2):
            clients.wait_for(3)
            fresh.update(weights(version), version)
    assert not clients.faults
    assert all(list(answer.versions) == sorted(answer.versions) for answer in clients.answers)
    models = {version: replica(version or None) for version in range(3)}
    assert error(models, clients.prompts, clients.answers) <= TOLERANCE
    # The judge itself: under another version, the errors are large.
    assert error({each: models[(each + 1) % 3] for each in models}, clients.prompts, clients.answers) > 1
    assert sum(len(set(answer.versions)) > 1 for answer in clients.answers) >= 2
    wait_until(lambda: sglang.asked("/generate") - before >= len(clients.answers))
    assert sglang.asked("/generate") - before == len(clients.answers)


@pytest.mark.parametrize(
    ("fault", "words"),
    [("missing", "(?i)repo id"), ("wrong name", "foo"), ("wrong shape", "norm"), ("missing tensor", "k_proj")],
)
def test_load_that_fails_leaves_the_old_version(
    fresh: HTTPRollout, sglang: SGLangProcess, tmp_path: Path, fault: str, words: str
) -> None:
    """SGLang would load a folder with a wrong name or without a tensor, and a wrong shape would end it."""
    fresh.update(weights(1), 1)
    with pytest.raises((RuntimeError, ValueError), match=words):
        fresh.load(folders(sglang.model, tmp_path / "folders")[fault], 2)
    assert fresh.version == 1
    answers = run(*(fresh.generate(prompt(i), endless(12, seed=i)) for i in range(4)))
    assert {version for answer in answers for version in answer.versions} == {1}
    assert error({1: replica(1)}, [prompt(i) for i in range(4)], answers) <= TOLERANCE
    fresh.update(weights(2), 3)
    answers = run(fresh.generate(prompt(1), endless(12)))
    assert error({3: replica(2)}, [prompt(1)], answers) <= TOLERANCE
    assert sglang.healthy()


def test_weights_that_are_not_finite_stop_the_run(fresh: HTTPRollout, sglang: SGLangProcess, tmp_path: Path) -> None:
    """They are an error of the run, and no ValueError of one prompt."""
    fresh.load(folders(sglang.model, tmp_path / "folders")["not finite"], 1)
    with pytest.raises(RuntimeError, match="version 1 gives log-probs that are not finite"):
        run(fresh.generate(prompt(1), endless(4)))
    fresh.update(weights(2), 2)
    answers = run(fresh.generate(prompt(1), endless(12)))
    assert answers[0].versions == (2,) * 12
    assert error({2: replica(2)}, [prompt(1)], answers) <= TOLERANCE


def test_second_rollout_on_a_server_is_refused_while_the_first_lives(
    fresh: HTTPRollout, sglang: SGLangProcess, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="belongs to another HTTPRollout"):
        HTTPRollout(sglang.url, SGLang(), folder=tmp_path / "second", model=sglang.model, deadline=30)
    assert len(run(fresh.generate(prompt(1), endless(3)))[0].tokens) == 3


def test_server_that_was_started_again_is_brought_back(fresh: HTTPRollout, sglang: SGLangProcess) -> None:
    """No token has the version of other weights: the version of the update is loaded again."""
    fresh.update(weights(1), 1)
    sglang.restart()
    answers = run(*(fresh.generate(prompt(i), endless(30, seed=i)) for i in range(4)))
    assert {version for answer in answers for version in answer.versions} == {1}
    assert error({1: replica(1)}, [prompt(i) for i in range(4)], answers) <= TOLERANCE
