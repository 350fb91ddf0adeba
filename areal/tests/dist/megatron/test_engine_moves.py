"""A run that goes on in another engine, from a checkpoint with its optimizer, compared with one that stays."""

from __future__ import annotations

from contextlib import AbstractContextManager
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from areal.api import MuonConfig, OptimizerConfig, SaveLoadMeta, StepOutput, TrainEngine
from areal.tests.dist.checkpoint.checkpoints import DCP, unharmed
from areal.tests.grid.models import model_dir
from areal.tests.harness.tiny import (
    NEEDS_JAX,
    OPTIMIZER,
    family_dir,
    global_batch,
    local_batch,
    loss,
    started,
    weights_of,
)

pytest.importorskip("megatron.core")

SGD = OptimizerConfig(type="sgd", lr=0.1, momentum=0.9)
MUON = OPTIMIZER.model_copy(update={"type": "muon", "muon": MuonConfig(dtype="float32")})
BOUND = 1e-5


def case(name: str, *chain: str, family: str = "qwen3", plain: bool = False, **options: Any) -> Any:
    """Return a chain of engines as parameters, marked with its world size; ``plain`` is without a distributed optimizer."""
    jax = any(backend.startswith("jax:") for backend in chain)
    marks: list[Any] = [pytest.mark.world(int(chain[0][-1]), **({"timeout": 400} if jax else {}))]
    return pytest.param(chain, family, plain, options, id=name, marks=[*marks, *([NEEDS_JAX] if jax else [])])


ORDERS = [*permutations(("fsdp:d{}", "jax:t{}", "megatron:p{}"))]
"""All orders of three engines, each with another kind of parallelism on two ranks."""

CASES = [
    case("megatron-fsdp", "megatron:d1", "fsdp:d1"),
    case("megatron:t2-fsdp:d2", "megatron:t2", "fsdp:d2", family="qwen3_tied"),
    case("fsdp:t2-megatron:d2", "fsdp:t2", "megatron:d2"),
    case("megatron:p2-fsdp:p2-megatron:t2", "megatron:p2", "fsdp:p2", "megatron:t2", family="qwen3_tied"),
    case("plain optimizer", "megatron:d2", "fsdp:d2", plain=True),
    case("momentum", "megatron:t2", "fsdp:d2", "megatron:p2", optimizer=SGD),
    case("muon", "megatron:t2", "fsdp:d2", "jax:t2", "megatron:d2", optimizer=MUON),
    case("muon, plain optimizer", "megatron:p2", "fsdp:p2", plain=True, optimizer=MUON),
    case("value head", "megatron:d2", "fsdp:d2", value_head=True),
    *(
        case("-".join(it.partition(":")[0] for it in order) + f"-w{size}", *(it.format(size) for it in order))
        for size in (1, 2)
        for order in ORDERS
    ),
]


def steps(engine: TrainEngine, first: int) -> list[StepOutput]:
    """Take two steps with the batches of the seeds ``first`` and ``first + 1``."""
    return [engine.train_batch(local_batch(engine, global_batch(seed)), loss) for seed in (first, first + 1)]


@pytest.mark.parametrize(("chain", "family", "plain", "options"), CASES)
def test_a_run_that_moves_equals_one_that_stays(
    chain: tuple[str, ...], family: str, plain: bool, options: dict[str, Any], tmp_path: Path
) -> None:
    """Compare loss, gradient norm and weights of two steps in each engine with those of the first engine."""

    def engine_of(backend: str) -> AbstractContextManager[TrainEngine]:
        own = {"megatron": {"distributed_optimizer": False}} if plain and backend.startswith("megatron") else {}
        return started(backend, path=family_dir(family), **{"optimizer": OPTIMIZER, **options, **own})

    with engine_of(chain[0]) as engine:
        start = weights_of(engine)
        curve = steps(engine, 0)
        engine.save(SaveLoadMeta(tmp_path / "0", DCP))
        for number in range(1, len(chain)):
            curve += steps(engine, 2 * number)
        expected, lr = weights_of(engine), engine.lr
    moved = curve[:2]
    for number, backend in enumerate(chain[1:], 1):
        with engine_of(backend) as engine:
            engine.load(SaveLoadMeta(tmp_path / str(number - 1), DCP))
            moved += steps(engine, 2 * number)
            engine.save(SaveLoadMeta(tmp_path / str(number), DCP))
            weights, rate = weights_of(engine), engine.lr
    assert rate == lr
    assert [it.loss for it in moved] == pytest.approx([it.loss for it in curve], rel=BOUND)
    assert [it.grad_norm for it in moved] == pytest.approx([it.grad_norm for it in curve], rel=BOUND)
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        assert (weight - expected[name]).norm() <= BOUND * expected[name].norm(), name
        assert name == "value_head.weight" or (expected[name] - start[name]).norm() > 1e-3 * start[name].norm()


@pytest.mark.world(2)
def test_experts_do_not_move_between_fsdp_and_megatron(tmp_path: Path) -> None:
    """In memory, the FSDP engine has the experts of a layer in one tensor."""
    names = {"fsdp": r"experts\.gate_up_proj'", "megatron": r"experts\.0\.gate_proj\.weight'"}
    for saver, loader in (("fsdp", "megatron"), ("megatron", "fsdp")):
        path = tmp_path / saver
        with started(f"{saver}:d2", path=model_dir("qwen3_moe")) as engine:
            engine.save(SaveLoadMeta(path, DCP))
        refused = pytest.raises(ValueError, match=rf"has no .*{names[loader]}.*weight_format='hf'")
        with started(f"{loader}:d2", path=model_dir("qwen3_moe")) as engine, unharmed(engine), refused:
            engine.load(SaveLoadMeta(path, DCP))
