"""Memory that a process frees, on a CPU: kept for later steps of an engine, and returned when asked for. Each case has a process of its own."""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import subprocess
import sys
from typing import Any
from unittest import mock

import pytest

from areal.tests.harness.tiny import family_dir
from areal.utils.profiling import host_memory

pytestmark = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="this C library has no mallopt()")

TOOLS = """
import json, resource, threading
import torch
from areal.utils import platform
from areal.utils.profiling.host_memory import resident_bytes
torch.set_num_threads(1)
found = {}

def faults(work):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    work()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
"""

BLOCKS = """
def work():
    tensors = [torch.zeros(12, 2**20) for _ in range(2)]

def in_thread():
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

platform.keep_freed(torch.device("cpu"))
found["faults"] = [faults(work) for _ in range(12)]
found["faults_of_threads"] = [faults(in_thread) for _ in range(12)]
kept = resident_bytes()
platform.free_memory(torch.device("cpu"))
found["returned"] = kept - resident_bytes()
print(json.dumps(found))
"""

ENGINE = """
from areal import FinetuneSpec, TrainEngineConfig, create_engine

config = TrainEngineConfig(path=PATH, backend=BACKEND, dtype="float32", optimizer={"lr": 1e-3})
batch = [{"input_ids": torch.arange(1024)}]
with create_engine(config) as engine:
    engine.initialize(FinetuneSpec(total_train_steps=9))
    step = lambda: engine.train_batch(batch, lambda outputs, batch: -outputs.logprobs.sum())
    found["faults"] = [faults(step) for _ in range(8)]
print(json.dumps(found))
"""

PAGES = 2 * 12 * 2**20 * 4 // 4096
"""Pages of the blocks."""


def run(*parts: str, **environment: str) -> dict[str, Any]:
    """Run a script, and return what it found."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", "".join((TOOLS, *parts))]
    result = subprocess.run(
        command, env={**kept, **environment}, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def test_freed_blocks_are_kept_until_a_check_of_memory() -> None:
    found = run(BLOCKS)
    print(f"page faults of each round {found['faults']}, in a thread {found['faults_of_threads']}")
    # Some rounds get new memory, until there are blocks of the right alignment.
    assert statistics.median(found["faults"][6:]) < PAGES / 20
    assert statistics.median(found["faults_of_threads"][6:]) < PAGES / 20
    assert found["returned"] > 0.9 * PAGES * 4096


def test_settings_of_the_user_stay() -> None:
    found = run(BLOCKS, MALLOC_TRIM_THRESHOLD_="131072")
    assert min(found["faults"]) > 0.9 * PAGES


@pytest.mark.parametrize("backend", ["fsdp:d1", "jax:d1"])
def test_steps_of_an_engine_find_the_memory_of_earlier_ones(backend: str) -> None:
    path = family_dir("qwen3", vocab_size=16384, tie_word_embeddings=True)
    found = run(f"PATH, BACKEND = {path!r}, {backend!r}", ENGINE)["faults"]
    print(f"{backend}: page faults of each step {found}")
    pages_of_logits = 1024 * 16384 * 4 // 4096
    assert statistics.median(found[-5:]) < pages_of_logits / 20


@pytest.mark.parametrize(("accepts", "expected"), [(1, {-3, -1, -8}), (0, {-3, -4, -1, -8})], ids=["newer", "older"])
def test_library_without_large_thresholds_maps_no_block(accepts: int, expected: set[int]) -> None:
    """Before glibc 2.35, a threshold of 1 GiB is refused."""
    library = mock.Mock()
    library.mallopt.side_effect = lambda parameter, value: accepts if parameter == -3 else 1
    with mock.patch.object(host_memory.ctypes, "CDLL", return_value=library):
        host_memory.hold()
    settings = dict(call.args for call in library.mallopt.call_args_list)
    assert settings.keys() == expected
    assert settings[-1] == -1
    assert settings.get(-4, 0) == 0
