"""A server without ``/inference/v1/generate`` and with a key: requests are repeated after an update, and each one has the key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from areal.inference.http import HTTPRollout
from areal.tests.vllm import server
from areal.tests.vllm.answers import TOLERANCE, endless, error, prompt, run
from areal.tests.vllm.server import VLLMProcess, replica, weights
from areal.tests.vllm.updates import across_updates

pytestmark = server.marks


@pytest.fixture(scope="module")
def server_options() -> dict[str, Any]:
    return {"scale_out": False, "lora": False, "environment": {"VLLM_API_KEY": "of-the-test"}}


def test_answers_across_updates_have_the_versions_of_their_tokens(fresh: HTTPRollout, vllm: VLLMProcess) -> None:
    """A request that an update interrupted is continued by another one."""
    before = vllm.asked("/v1/completions")
    answers = across_updates(fresh).answers
    assert vllm.asked("/v1/completions") - before > len(answers)
    assert vllm.asked("/inference/v1/generate") == 0


def test_each_version_gives_its_own_log_probs(fresh: HTTPRollout) -> None:
    for version in range(3):
        if version:
            fresh.update(weights(version), version)
        answers = run(fresh.generate(prompt(1), endless(16, 0.7, top_p=0.9, seed=3)))
        assert answers[0].versions == (version,) * 16
        assert error({version: replica(version or None)}, [prompt(1)], answers) <= TOLERANCE / 0.7


@pytest.mark.parametrize("key", [None, "of-another"])
def test_wrong_key_is_an_error_with_the_servers_words(connect: Callable[..., HTTPRollout], key: str | None) -> None:
    with pytest.raises((RuntimeError, ValueError), match=r"401.*Unauthorized"):
        run(connect(api_key=key).generate(prompt(1), endless(3)))
