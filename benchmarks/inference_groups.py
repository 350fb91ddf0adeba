"""Updates of one real vLLM server on the CPU over a process group (gloo), against updates through a folder. The model has 100 MB.

``make bench-servers``
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from areal.inference import VLLM, HTTPRollout
from areal.inference.http.group import GlooCarrier
from areal.tests.grid.models import FAMILIES, tiny_model
from areal.tests.harness.servers.group.sending import GroupSending
from areal.tests.vllm.server import PLUGIN, PYTHON, SIZES, VLLMProcess
from areal.weight_sync.apply import ModuleSource

LARGE = {**SIZES, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8}
WAYS: dict[str, dict[str, Any]] = {
    "packed": {},
    "one by one": {"packed_bytes": None},
}
IN_TURN = 4
"""Updates by one way before the other one's turn."""


def seconds_of(update: Callable[[int], object], first: int) -> list[float]:
    """Return the seconds of some updates."""
    seconds = []
    for version in range(first, first + 1 + IN_TURN):
        begin = time.perf_counter()
        update(version)
        seconds.append(time.perf_counter() - begin)
    # The first one finds the label of the other way, and makes another group.
    return seconds[1:]


def by_folder(rollout: HTTPRollout, source: ModuleSource, version: int) -> None:
    """Send an update through the folder of a rollout."""
    rollout.update(source.named_tensors(), version)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    if not PYTHON.exists():
        raise SystemExit(f"{PYTHON} is missing: run `make bench-servers`")
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        tiny_model(FAMILIES["qwen3"](**LARGE), 0).save_pretrained(model)
        flags = ["--weight-transfer-config", json.dumps({"backend": "gloo"})]
        vllm = VLLMProcess(str(model), lora=False, flags=flags, environment={"PYTHONPATH": str(PLUGIN)})
        source = ModuleSource(tiny_model(FAMILIES["qwen3"](**LARGE), 1))
        print(f"{'updates (median, ms)':34}{'disk':>10}{'group':>10}{'ratio':>8}")
        try:
            for way, options in WAYS.items():
                transport = GroupSending([vllm.url], VLLM(), GlooCarrier(), timeout=60, **options)
                disk, group = [], []
                with HTTPRollout(vllm.url, VLLM(), folder=Path(folder) / "weights", take_over=True) as rollout:
                    for number in range(rounds):
                        first = 2 * number * (1 + IN_TURN)
                        disk += seconds_of(partial(by_folder, rollout, source), first)
                        group += seconds_of(partial(transport.send, source), first + 1 + IN_TURN)
                transport.close()
                by_disk, by_group = 1e3 * statistics.median(disk), 1e3 * statistics.median(group)
                print(f"{way:34}{by_disk:10.0f}{by_group:10.0f}{by_group / by_disk:8.2f}")
        finally:
            vllm.close()


if __name__ == "__main__":
    main()
