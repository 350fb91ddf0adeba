"""GRPO on a rollout of SGLang: its log-probs are the trainer's."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal.inference.http import SGLang
from areal.tests.sglang import server
from areal.tests.sglang.server import SGLangProcess
from areal.tests.vllm.updates import three_steps_of_grpo

pytestmark = server.marks


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_three_steps_of_grpo_have_the_trainers_log_probs(
    sglang: SGLangProcess, tmp_path: Path, max_staleness: int
) -> None:
    three_steps_of_grpo(sglang.url, SGLang(), tmp_path, max_staleness)
