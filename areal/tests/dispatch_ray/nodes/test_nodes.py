"""Runs on a cluster of several nodes, which are processes of this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from areal.tests.dispatch_ray.nodes.two_nodes import LOST_IN
from areal.tests.dist.trainer.grpo_program import COMPARED, STEPS

pytestmark = [pytest.mark.timeout(600)]


def test_grpo_on_two_nodes_goes_on_with_another_node(apart: dict[str, str], tmp_path: Path) -> None:
    """Four ranks in two bundles. The node of two ranks is killed in a step. The curve is that of a run without the loss, to the bit."""
    program = [sys.executable, "-m", "areal.tests.dispatch_ray.nodes.two_nodes", str(tmp_path)]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=580, env=apart)
    assert ended.returncode == 0, ended.stdout[-5000:] + ended.stderr
    said: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])

    # Two processes of each node have consecutive ranks, before and after.
    assert said["nodes"] == said["nodes now"] == [0, 0, 2, 2]
    assert said["local"] == ["0/2", "1/2", "0/2", "1/2"]
    assert not said["lost node is used"]

    assert said["rank"] in (2, 3)
    assert said["seconds"] < 15
    assert "during train_batch" in said["text"]
    assert said["resumed"] == LOST_IN - 1
    for name in COMPARED:
        whole, with_loss = said["curves"][name]
        assert len(whole) == STEPS
        assert with_loss == whole, name
