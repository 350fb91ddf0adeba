"""Loads that fail, weights that are not finite, and a server that is killed and started again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from areal.inference.http import HTTPRollout
from areal.inference.protocol import Completion
from areal.tests.harness.limits import promptly, wait_until
from areal.tests.vllm import server
from areal.tests.vllm.answers import TOLERANCE, endless, error, prompt, run
from areal.tests.vllm.exchanges import folders
from areal.tests.vllm.server import VLLMProcess, replica, weights

pytestmark = server.marks

FAILED = {
    "missing": "(?i)repo id|missing|not exist|no such|no directory",
    "wrong name": "There is no module or parameter named|foo",
    "wrong shape": r"Attempted to load weight|torch.Size\(\[64\]\)|shape",
}
"""Folders that cannot be loaded, with words of the error."""


@pytest.mark.parametrize("fault", ["missing", "wrong name", "wrong shape"])
def test_load_that_fails_ends_at_once_and_the_old_version_serves_on(
    fresh: HTTPRollout, vllm: VLLMProcess, tmp_path: Path, fault: str
) -> None:
    fresh.update(weights(1), 1)
    with promptly(), pytest.raises((RuntimeError, ValueError), match=FAILED[fault]):
        fresh.load(folders(vllm.model, tmp_path / "folders")[fault], 2)
    assert fresh.version == 1
    answers = run(*(fresh.generate(prompt(i), endless(12, seed=i)) for i in range(4)))
    assert {version for answer in answers for version in answer.versions} == {1}
    assert error({1: replica(1)}, [prompt(i) for i in range(4)], answers) <= TOLERANCE
    # The next update succeeds.
    fresh.update(weights(3), 3)
    answers = run(fresh.generate(prompt(1), endless(12)))
    assert error({3: replica(3)}, [prompt(1)], answers) <= TOLERANCE
    assert vllm.healthy()


def test_weights_that_are_not_finite_stop_the_run(fresh: HTTPRollout, vllm: VLLMProcess, tmp_path: Path) -> None:
    """They are an error of the run, and no ValueError of one prompt."""
    with pytest.raises(RuntimeError):  # noqa: PT012 - a client may look at the tensors before
        fresh.load(folders(vllm.model, tmp_path / "folders")["not finite"], 1)
        run(fresh.generate(prompt(1), endless(4)))
    fresh.update(weights(2), 2)
    answers = run(fresh.generate(prompt(1), endless(12)))
    assert answers[0].versions == (2,) * 12
    assert error({2: replica(2)}, [prompt(1)], answers) <= TOLERANCE


def test_requests_survive_a_server_that_is_killed_and_started_again(
    connect: Callable[..., HTTPRollout], vllm: VLLMProcess
) -> None:
    """It starts with the weights that it had: its first version."""
    vllm.restart()
    rollout = connect(deadline=400, timeout=400)
    results: list[Completion] = []
    prompts = [prompt(i) for i in range(8)]

    def generate() -> None:
        results.extend(
            run(*(rollout.generate(each, endless(480, seed=i)) for i, each in enumerate(prompts)), seconds=400)
        )

    thread = threading.Thread(target=generate)
    thread.start()
    wait_until(lambda: vllm.metric("vllm:generation_tokens_total") > 100)
    vllm.kill()
    assert thread.is_alive()
    vllm.start()
    thread.join(120)
    assert [len(answer.tokens) for answer in results] == [480] * 8
    assert {version for answer in results for version in answer.versions} == {0}
    assert error({0: replica()}, prompts, results) <= TOLERANCE
    # And it can be updated.
    rollout.update(weights(1), 1)
    answers = run(rollout.generate(prompt(1), endless(12)))
    assert error({1: replica(1)}, [prompt(1)], answers) <= TOLERANCE
