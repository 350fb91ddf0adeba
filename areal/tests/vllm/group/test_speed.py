"""Updates over a process group against updates through the disk, of a model of 100 MB on a real vLLM server."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from areal.tests.grid.models import FAMILIES, model_dir, tiny_model
from areal.tests.harness.world import record
from areal.tests.vllm.group.test_updates import PLUGIN
from areal.tests.vllm.server import SIZES, VLLMProcess, marks
from areal.trainer.rollout.http import VLLM, HTTPRollout
from areal.trainer.rollout.http.group import GlooCarrier, VLLMGroupTransport
from areal.utils.distributed import ControlPlane
from areal.weight_sync.apply import ModuleSource

pytestmark = marks

LARGE = {**SIZES, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8}
PACKED_BYTES = 2**30


@pytest.fixture(scope="module")
def server_options() -> dict[str, Any]:
    flags = ["--weight-transfer-config", json.dumps({"backend": "gloo"})]
    return {
        "model": model_dir("qwen3", **LARGE),
        "lora": False,
        "flags": flags,
        "environment": {"PYTHONPATH": str(PLUGIN)},
    }


@pytest.mark.parametrize("packed_bytes", [None, PACKED_BYTES])
def test_group_is_not_slower_than_the_disk(vllm: VLLMProcess, tmp_path: Path, packed_bytes: int | None) -> None:
    """Medians of updates of the same server by the transport, and by a rollout through its folder."""
    control, source = ControlPlane(alone=True), ModuleSource(tiny_model(FAMILIES["qwen3"](**LARGE), 1))
    transport = VLLMGroupTransport(control, [vllm.url], GlooCarrier(), packed_bytes=packed_bytes)
    seconds: dict[str, list[float]] = {"group": [], "disk": []}

    def measure(way: str, update: Callable[[int], object], versions: range) -> None:
        for version in versions:
            begin = time.monotonic()
            update(version)
            # The first one of a turn finds the label of the other way, and so another group.
            if version > versions.start:
                seconds[way].append(time.monotonic() - begin)

    with HTTPRollout(vllm.url, VLLM(), folder=tmp_path, take_over=True) as rollout:
        for turn in range(3):
            versions = range(5 * turn, 5 * turn + 5)
            measure("disk", lambda i: rollout.update(source.named_tensors(), i), versions)
            measure("group", lambda i: transport.send(source, i), versions)
    transport.close()
    medians = {way: statistics.median(times) for way, times in seconds.items()}
    shown = {way: f"{median:.3f}" for way, median in medians.items()}
    record("updates of vLLM, in seconds", f"100 MB, packed_bytes = {packed_bytes}", **shown)
    assert medians["group"] <= medians["disk"], medians
