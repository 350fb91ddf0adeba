"""A server with the log-probs of the model, not of the distribution that it draws from, is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from areal.inference.http import HTTPRollout
from areal.tests.vllm import server
from areal.tests.vllm.answers import endless, prompt, run

pytestmark = server.marks


@pytest.fixture(scope="module")
def server_options() -> dict[str, Any]:
    return {"processed": False}


def test_raw_log_probs_are_refused(connect: Callable[..., HTTPRollout]) -> None:
    with pytest.raises(ValueError, match="processed_logprobs"):
        run(connect().generate(prompt(1), endless(4, 0.7)))
