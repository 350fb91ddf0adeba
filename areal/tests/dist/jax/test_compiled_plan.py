"""Plans of the JAX engine against engines with four devices: bytes of the state, and the programs that the engine runs."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("jax")

import jax

from areal.api import MicroBatchSpec, MuonConfig, OptimizerConfig
from areal.engine.jax import bridge, optimizer
from areal.engine.jax.ahead.devices import planned_devices
from areal.engine.jax.ahead.programs import Programs
from areal.plan.compiled_collectives import collectives, step_collectives
from areal.plan.compiled_plan import plan_compiled
from areal.plan.trace import Workload
from areal.tests.harness.processes import needs_own_world, succeed
from areal.tests.harness.tiny import config, family_dir, started

pytestmark = needs_own_world

WORKLOAD = Workload(sequences=4, length=24, micro_batch=48)
TIMEOUT = 240.0
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "shards": ("jax:d4", "qwen3", {}),
    "tensors": ("jax:d2t2", "qwen3", {"dtype": "bfloat16", "activation_checkpointing": "full"}),
    "replicas of parts": ("jax:r2c2", "qwen3", {}),
    "experts": ("jax:d2e2", "qwen3_moe", {}),
}


def compare(backend: str, family: str, changes: dict[str, Any]) -> None:
    """Compare the plan of a step with an engine of this process that has taken one."""
    spec, devices = MicroBatchSpec(max_tokens_per_mb=WORKLOAD.micro_batch), {"devices_per_process": 4}
    settings = {**changes, "path": family_dir(family), "mb_spec": spec, "jax": devices}
    texts: dict[str, int] = {}

    def recorded(program: Any) -> Any:
        def run(*args: Any) -> Any:
            text = program.lower(*args).compile().as_text()
            texts[text] = texts.get(text, 0) + 1
            return program(*args)

        return run

    with started(backend, **settings) as engine, pytest.MonkeyPatch.context() as patch:
        for module, name in ((bridge, "_forward"), (bridge, "_pull"), (optimizer, "_update")):
            patch.setattr(module, name, recorded(getattr(module, name)))
        step = engine.train_batch(WORKLOAD.batch() * engine.dims.dp, lambda out, mb: -out.logprobs.sum())
        memory, mesh = engine.memory()[0], engine._components.model.spec.mesh
    plan = plan_compiled(config(backend, **settings), WORKLOAD, jax.devices())
    # Of an engine, the bytes are a sum over its devices.
    assert 4 * plan.memory["parameters"] == memory.params.total > 0
    assert 4 * plan.memory["optimizer"] == memory.optimizer.total > 0
    assert plan.n_mbs == step.n_mbs == 2
    # The same programs, to the letter of their collectives.
    assert plan.collectives == step_collectives(texts, mesh.shape)
    assert plan.memory["residuals"] > 0
    assert plan.memory["temporaries"] > 0


@pytest.mark.parametrize("case", CASES)
def test_plan_is_the_step_of_four_devices(case: str) -> None:
    succeed(1, compare, *CASES[case], timeout=TIMEOUT)


MUON = OptimizerConfig(type="muon", muon=MuonConfig(dtype="float32"))


def divide_muon(family: str, layouts: list[str]) -> None:
    """Compare the operations of a step of Muon on each of four devices with those on one, and look at what they exchange."""
    devices = planned_devices("cpu:4")
    operations: dict[str, float] = {}
    for backend in ("jax:d1", *layouts):
        settings = config(backend, path=family_dir(family, num_hidden_layers=4), optimizer=MUON)
        program = Programs.of(settings, devices[: settings.dims.world_size], 64).update(MUON)
        operations[backend] = program.cost_analysis()["flops"]
        exchanged = collectives(program.as_text())
        # Routers, of 4 x 32, are on all devices.
        gathered = [each.shape for each in exchanged if each.kind != "all-to-all" and each.shape != (4, 4, 32)]
        assert gathered == [], backend
    print(operations)
    whole = operations.pop("jax:d1")
    assert all(0.25 * whole <= own < 0.28 * whole for own in operations.values())


@pytest.mark.parametrize(
    ("family", "layouts"), [("qwen3", ["jax:d4", "jax:d2t2"]), ("qwen3_moe", ["jax:d4", "jax:d2e2"])]
)
def test_muon_computes_each_matrix_on_one_device(family: str, layouts: list[str]) -> None:
    succeed(1, divide_muon, family, layouts, timeout=TIMEOUT)
