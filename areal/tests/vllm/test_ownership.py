"""A server belongs to one rollout, which notices when the server is another one than it believes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from areal.inference.http import VLLM, HTTPRollout
from areal.inference.protocol import Completion
from areal.tests.grid.models import model_dir
from areal.tests.harness.limits import wait_until
from areal.tests.vllm import server
from areal.tests.vllm.answers import TOLERANCE, endless, error, prompt, run
from areal.tests.vllm.exchanges import folders
from areal.tests.vllm.server import CONTEXT, VLLMProcess, replica, weights
from areal.tests.vllm.updates import across_updates

pytestmark = server.marks


def test_updates_keep_running_requests(fresh: HTTPRollout, vllm: VLLMProcess) -> None:
    """Each answer is one request, by the log of the server."""
    before = vllm.asked("/inference/v1/generate")
    answers = across_updates(fresh).answers
    wait_until(lambda: vllm.asked("/inference/v1/generate") - before >= len(answers))
    assert vllm.asked("/inference/v1/generate") - before == len(answers)
    assert vllm.asked("/v1/completions") == 0


def test_answer_beyond_the_context_is_a_value_error(connect: Callable[..., HTTPRollout]) -> None:
    rollout = connect()
    with pytest.raises(ValueError, match=str(CONTEXT)):
        run(rollout.generate(prompt(1, CONTEXT - 8), endless(9)))
    assert len(run(rollout.generate(prompt(1, CONTEXT - 8), endless(8)))[0].tokens) == 8


def test_folder_that_lacks_a_tensor_is_refused(fresh: HTTPRollout, vllm: VLLMProcess, tmp_path: Path) -> None:
    fresh.update(weights(1), 1)
    with pytest.raises((RuntimeError, ValueError), match="k_proj"):
        fresh.load(folders(vllm.model, tmp_path / "folders")["missing tensor"], 2)
    answers = run(fresh.generate(prompt(1), endless(12)))
    assert answers[0].versions == (1,) * 12
    assert error({1: replica(1)}, [prompt(1)], answers) <= TOLERANCE


def test_update_of_the_model_below_an_adapter_is_refused(
    connect: Callable[..., HTTPRollout], vllm: VLLMProcess
) -> None:
    loads = vllm.asked("/collective_rpc")
    with pytest.raises(ValueError, match="policy"):
        connect("policy").update(weights(1), 1)
    assert vllm.asked("/collective_rpc") == loads


def test_server_of_another_model_is_refused(
    connect: Callable[..., HTTPRollout], vllm: VLLMProcess, tmp_path: Path
) -> None:
    other = model_dir("qwen3")
    with pytest.raises(ValueError, match=rf"{vllm.url}: it has the model '{vllm.model}', and .* '{other}'"):
        HTTPRollout(vllm.url, VLLM(), folder=tmp_path, model=other, deadline=30)


def test_second_rollout_on_a_server_is_refused_while_the_first_lives(
    fresh: HTTPRollout, vllm: VLLMProcess, tmp_path: Path
) -> None:
    def second() -> Completion:
        with HTTPRollout(vllm.url, VLLM(), folder=tmp_path / "second", model=vllm.model, deadline=30) as other:
            other.update(weights(2), 1)
            return run(other.generate(prompt(1), endless(4)))[0]

    fresh.update(weights(1), 1)
    with pytest.raises((RuntimeError, ValueError), match="own"):
        second()
    # The first one is not disturbed.
    answers = run(fresh.generate(prompt(1), endless(12)))
    assert answers[0].versions == (1,) * 12
    assert error({1: replica(1)}, [prompt(1)], answers) <= TOLERANCE
    fresh.close()
    assert second().versions == (1,) * 4


def test_server_that_was_started_again_is_noticed_before_its_next_token_counts(
    fresh: HTTPRollout, vllm: VLLMProcess
) -> None:
    """No token has the version of other weights, and an update brings the server back at the latest."""
    fresh.update(weights(1), 1)
    given, kept = [prompt(i) for i in range(8)], []
    kept += run(*(fresh.generate(each, endless(12)) for each in given))
    vllm.restart()
    try:
        kept += run(*(fresh.generate(each, endless(60, seed=1)) for each in given))
    except RuntimeError as fault:
        print("the client says:", fault)
    judged = [(each, answer) for each, answer in zip(given * 2, kept, strict=False)]
    models = {0: replica(), 1: replica(1)}
    assert error(models, [each for each, _ in judged], [answer for _, answer in judged]) <= TOLERANCE
    fresh.update(weights(2), 2)
    answers = run(fresh.generate(prompt(1), endless(12)))
    assert answers[0].versions == (2,) * 12
    assert error({2: replica(2)}, [prompt(1)], answers) <= TOLERANCE
