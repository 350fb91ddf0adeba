"""verl's training worker on our engines, against verl's own engine: an actor with PPO's loss, a critic, and ranks on Ray actors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="verl is not installed: make test-verl")

from areal.api import ParallelDims
from areal.tests.harness.world import record
from areal.tests.verl.sft import environment, write_model

pytestmark = pytest.mark.timeout(600)

LAYOUTS = ("fsdp:d1", "fsdp:d2", "fsdp:p2", "megatron:t2", "jax:d2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("workers")


def run(folder: Path, role: str, engine: str, *, ray: bool = False) -> dict[str, Any]:
    """Run the worker's calls in the processes of a layout, or in Ray actors."""
    model = folder / f"model-{role}"
    if not model.exists():
        write_model(model, critic=role == "critic")
    ranks = 1 if engine == "verl" else ParallelDims.parse(engine).world_size
    agent = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    program = "areal.tests.verl.ray_workers" if ray else "areal.tests.verl.rl_worker"
    own = folder / f"{role}-{engine.replace(':', '-')}-{ray}"
    done = subprocess.run(
        [sys.executable, *([] if ray else agent), "-m", program, str(model), role, engine, str(own)],
        env=environment(**({"VERL_ENGINE_DEVICE": "cuda"} if engine == "verl" else {})),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    said = [line.removeprefix("SAID ") for line in done.stdout.splitlines() if line.startswith("SAID ")]
    assert said, (done.stdout + done.stderr)[-6000:]
    return json.loads(said[-1])


@pytest.fixture(scope="module")
def references(folder: Path) -> dict[str, dict[str, Any]]:
    return {role: run(folder, role, "verl") for role in ("actor", "critic")}


def assert_close(what: str, said: dict[str, Any], expected: dict[str, Any]) -> None:
    def error(name: str) -> float:
        return max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(said[name], expected[name], strict=True))

    # The last output of a sequence is the log-prob of the next sequence's first token in verl, and 0 here; values have no such token.
    outputs = max(
        abs(a - b)
        for ours, theirs in zip(said["outputs"], expected["outputs"], strict=True)
        for a, b in zip(ours[:-1], theirs[:-1], strict=True)
    )
    errors = {"losses": error("losses"), "norms": error("norms"), "outputs": outputs}
    record("verl's training worker against its own engine", what, **{name: f"{x:.0e}" for name, x in errors.items()})
    assert errors["losses"] <= 1e-6
    assert errors["norms"] <= 1e-5
    assert outputs <= 1e-5
    weights = [each.get("weights", {}) for each in (said, expected)]
    assert weights[0].keys() == weights[1].keys()
    assert weights[0] == pytest.approx(weights[1], rel=1e-5)
    # State that verl wants on the host is there again after a save and after a load.
    assert (said["on_device"], expected["on_device"]) == ([0] * 4, [])
    # The step after the load is that after the save.
    assert said["losses"][-1] == said["losses"][-2]
    assert said["norms"][-1] == said["norms"][-2]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("role", ["actor", "critic"])
def test_worker_has_the_numbers_of_its_own_engine(
    role: str, layout: str, folder: Path, references: dict[str, dict[str, Any]]
) -> None:
    assert_close(f"{role} {layout}", run(folder, role, layout), references[role])


def test_worker_group_of_two_ray_actors(folder: Path, references: dict[str, dict[str, Any]]) -> None:
    said = run(folder, "actor", "fsdp:d2", ray=True)
    expected = references["actor"]
    error = max(abs(a - b) for a, b in zip(said["losses"], expected["losses"][:3], strict=True))
    record("verl's training worker against its own engine", "actor fsdp:d2 on two Ray actors", losses=f"{error:.0e}")
    assert error <= 1e-6
