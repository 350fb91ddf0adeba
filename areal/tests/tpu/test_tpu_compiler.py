"""Every program of every family compiles for TPUs: the compiler runs here, and no chip is needed."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import pytest

pytest.importorskip("jax", reason="needs the extra jax")
if find_spec("libtpu") is None:
    pytest.skip("the compiler of TPUs is not installed: make test-tpu", allow_module_level=True)

from jax.experimental import topologies

from areal.engine.jax.model.architecture import FAMILIES as OF_THE_ENGINE
from areal.tests.dist.jax.compiled import collectives
from areal.tests.grid.models import FAMILIES, OUTSIDE_THE_GRID
from areal.tests.harness.world import record
from areal.tests.tpu.programs import Shapes, compile_all

# libtpu would ask the metadata server of a cloud machine for these.
ENVIRONMENT = {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-8", "TPU_WORKER_HOSTNAMES": "localhost"}

LAYOUTS = {"v5p:2x2x1": (2, 1, 1, 2), "v6e:2x4": (2, 2, 2, 1)}
"""Ranks along ``dp``, ``ep``, ``cp`` and ``tp`` on the devices of a topology; a family without experts has those of ``ep`` along ``dp``."""

CONFIGS = {
    name: make for name, make in (FAMILIES | OUTSIDE_THE_GRID).items() if name.partition("_tied")[0] in OF_THE_ENGINE
}


@pytest.fixture(autouse=True)
def described_by_us(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        if name not in os.environ:
            monkeypatch.setenv(name, value)


def shapes_of(family: str, topology: str, changes: dict[str, int] | None = None, **options: Any) -> Shapes:
    sizes = {"hidden_size": 256, "head_dim": 128, "vocab_size": 512, "intermediate_size": 256, **(changes or {})}
    config = CONFIGS[family](**sizes)
    dp, ep, cp, tp = LAYOUTS[topology]
    layout = (dp, ep, cp, tp) if "moe" in family else (dp * ep, 1, cp, tp)
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    return Shapes(config, devices, layout, tokens=256, **options)


@pytest.mark.parametrize("topology", LAYOUTS)
@pytest.mark.parametrize("family", CONFIGS)
def test_all_programs_compile(family: str, topology: str) -> None:
    shapes = shapes_of(family, topology)
    # Splash on a whole stream, blocks on a divided one.
    assert (shapes.spec.kernel is None) == (LAYOUTS[topology][2] > 1 or len(set(shapes.spec.arch.windows)) > 1)
    compiled = compile_all(shapes)
    peaks = {name: program.memory_analysis().peak_memory_in_bytes for name, program in compiled.items()}
    record(
        "TPU programs: peak MiB of a device",
        f"{family}, {topology}",
        **{n: f"{p / 2**20:.1f}" for n, p in peaks.items()},
    )
    assert compiled.keys() == {"evaluate", "forward", "pull", "update"}
    assert all(peaks.values())


def test_head_in_chunks_is_gathered_and_reduced_once() -> None:
    shapes = shapes_of("qwen3", "v6e:2x4", {"vocab_size": 8192, "hidden_size": 1024}, keep_bytes=0)
    vocabulary, width = shapes.params()["lm_head.weight"].shape
    found = {name: collectives(program.as_text()) for name, program in compile_all(shapes).items()}
    # Embedding and head alone have as many rows as the vocabulary.
    traffic = {
        name: sum(each.elements(len(shapes.devices)) for each in those if vocabulary in each.shape)
        for name, those in found.items()
    }
    head = vocabulary * width
    record("TPU programs: elements of the head in collectives", "v6e:2x4", of_the_head=head, **traffic)
    # A lookup gathers the embedding once, and its gradient is reduced once.
    assert traffic["evaluate"] <= 2 * head
    assert traffic["forward"] + traffic["pull"] <= (3 + 2) * head
    in_loops = [each for those in found.values() for each in those if vocabulary in each.shape and each.times > 1]
    assert not in_loops, in_loops
