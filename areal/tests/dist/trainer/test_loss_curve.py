"""Twenty steps from the same weights on the same batches give the same losses on every engine: those in the golden file."""

import pytest

from areal.api import FinetuneSpec
from areal.engine.registry import create_engine
from areal.tests.grid.cases import dp_shard_indices
from areal.tests.grid.models import model_dir
from areal.tests.harness import loss_curve
from areal.tests.harness.tiny import config
from areal.tests.harness.world import record

BACKENDS = {
    1: ("fsdp:d1", "megatron:d1", "jax:d1"),
    2: ("fsdp:d2", "fsdp:t2", "fsdp:p2", "megatron:d2", "megatron:p2", "megatron:t2", "jax:d2", "jax:t2"),
    4: ("fsdp:d2c2", "megatron:d2p2"),
}
CASES = [
    pytest.param(backend, marks=[pytest.mark.world(size)]) for size, names in BACKENDS.items() for backend in names
]


@pytest.mark.parametrize("backend", CASES)
def test_losses_equal_golden_file(backend: str) -> None:
    expected = loss_curve.golden()
    assert expected[-1] < 0.9 * expected[0], "nothing is learned"
    settings = config(backend, path=model_dir(loss_curve.FAMILY), optimizer=loss_curve.OPTIMIZER)
    with create_engine(settings) as engine:
        engine.initialize(FinetuneSpec(total_train_steps=loss_curve.STEPS))
        mine = dp_shard_indices(loss_curve.CASE, engine.dp_rank, engine.dp_size)
        actual = []
        for step in range(loss_curve.STEPS):
            everything = loss_curve.batch(step)
            objective = loss_curve.OBJECTIVE
            step_output = engine.train_batch([everything[i] for i in mine], objective.loss_fn, objective.weight_fn)
            actual.append(step_output.loss)
    error = max(abs(a - b) / b for a, b in zip(actual, expected, strict=True))
    record("loss curves of 20 steps", backend, first=f"{actual[0]:.4f}", last=f"{actual[-1]:.4f}", error=f"{error:.0e}")
    assert error < 1e-4


def test_golden_file_equals_reference() -> None:
    assert loss_curve.compute() == pytest.approx(loss_curve.golden(), rel=1e-9)
