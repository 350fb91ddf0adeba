"""Memory report: the bytes of an engine by kind, on the device and offloaded, equal those of its tensors."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import Tensor
from torch.distributed.tensor import DTensor

from areal.api import EngineMemory, KindMemory, LoRAConfig, OptimizerConfig, TrainEngine
from areal.tests.harness.engine_bytes import bytes_on_device
from areal.tests.harness.tiny import JAX, NEEDS_JAX, global_batch, layout, layouts, local_batch, loss, started
from areal.utils import platform

KINDS = ("params", "grads", "optimizer")


def reported(engine: TrainEngine, place: str) -> dict[str, int]:
    """Return one number of the report for each kind."""
    (memory,) = engine.memory()
    return {kind: getattr(getattr(memory, kind), place) for kind in KINDS}


def n_parameters(engine: TrainEngine) -> int:
    """Return the number of parameters of the full model."""
    return sum(x.numel() for _, x in engine.named_tensors())


def nothing() -> dict[str, int]:
    return dict.fromkeys(KINDS, 0)


@pytest.mark.parametrize(
    "backend", [*layouts(1, 2, also=("fsdp:t2", "megatron:d2", "megatron:t2", *JAX)), layout("jax:t2")]
)
def test_report_equals_the_bytes_of_the_tensors(backend: str) -> None:
    with started(backend) as engine:
        batch = local_batch(engine, global_batch())
        planned = reported(engine, "total")
        assert reported(engine, "on_device") == bytes_on_device(engine)
        # A backward and a step create what the report has announced.
        engine.forward_backward(batch, loss)
        engine.optimizer_step()
        engine.forward_backward(batch, loss)
        before = bytes_on_device(engine)
        assert all(before.values())
        assert reported(engine, "on_device") == before == planned
        assert reported(engine, "missing") == reported(engine, "offloaded") == nothing()
        # Each kind for itself, then all of them.
        for kind in KINDS:
            engine.offload(**{other: other == kind for other in KINDS})
            assert reported(engine, "on_device") == {**before, kind: 0}
            assert reported(engine, "offloaded") == {**nothing(), kind: before[kind]}
            engine.onload()
        engine.offload()
        assert (reported(engine, "on_device"), reported(engine, "offloaded")) == (nothing(), before)
        engine.eval_batch(batch, loss)
        assert reported(engine, "on_device") == {**nothing(), "params": before["params"]}
        engine.onload()
        assert (reported(engine, "on_device"), reported(engine, "offloaded")) == (before, nothing())
        # Pending gradients of FSDP are freed; Megatron's buffers stay.
        engine.offload()
        engine.zero_grad()
        engine.train_batch(batch, loss)
        assert reported(engine, "on_device") == bytes_on_device(engine)
        assert reported(engine, "total") == planned


@pytest.mark.parametrize(
    "backend", layouts(2, engine="fsdp", also=("fsdp:d2", "megatron:d2", "jax:d2"), but=("fsdp:c2", "fsdp:p2"))
)
def test_report_is_of_the_shard(backend: str) -> None:
    """A rank of two holds half of the optimizer state, and on FSDP half of the weights."""
    with started(backend) as engine:
        n = n_parameters(engine)
        (memory,) = engine.memory()
        replicated = backend.startswith("megatron")
        # Buffers of Megatron are padded.
        assert memory.params.on_device == pytest.approx(4 * n if replicated else 4 * n / 2, rel=0.03)
        assert memory.optimizer.total == pytest.approx(8 * n / 2, rel=0.03)


@pytest.mark.parametrize("backend", ["fsdp:d1", "megatron:d1"])
@pytest.mark.world(1)
def test_adapters_are_counted_and_stay_on_the_device(backend: str) -> None:
    with started(backend, lora=LoRAConfig(rank=4)) as engine:
        engine.adapters.add("second")
        batch = local_batch(engine, global_batch())
        engine.forward_backward(batch, loss)
        (before,) = engine.memory()
        engine.optimizer_step()
        (after,) = engine.memory()
        adapters = engine._components.adapters
        own = [x for name in adapters.names for x in adapters[name].parameters]
        factors = nbytes(own)
        model = nbytes(engine._components.model.parameters())
        assert before.params == KindMemory(model + factors, fixed=factors)
        # One of two adapters is trained.
        assert before.grads == KindMemory(factors // 2, missing=factors // 2, fixed=factors)
        assert after.grads == KindMemory(missing=factors, fixed=factors)
        assert after.optimizer == KindMemory(factors, missing=factors, fixed=2 * factors)
        engine.offload()
        (away,) = engine.memory()
        assert away.params == KindMemory(factors, offloaded=model, fixed=factors)
        assert (away.on_device, away.offloaded) == (2 * factors, model)


@pytest.mark.parametrize(
    ("backend", "options", "moment", "main"),
    [
        ("fsdp:d1", {"fsdp": {"optimizer_state_dtype": "bfloat16"}}, 2 * 2, 0),
        ("fsdp:d1", {"optimizer": OptimizerConfig(type="sgd", momentum=0.9)}, 4, 0),
        ("fsdp:d1", {"optimizer": OptimizerConfig(type="sgd", momentum=0.0)}, 0, 0),
        ("megatron:d1", {"dtype": "bfloat16"}, 2 * 4, 4),
        pytest.param("jax:d1", {"dtype": "bfloat16"}, 2 * 4, 0, marks=[NEEDS_JAX]),
        pytest.param("jax:d1", {"optimizer": OptimizerConfig(type="sgd", momentum=0.0)}, 0, 0, marks=NEEDS_JAX),
    ],
    ids=["bfloat16-moments", "momentum", "plain-sgd", "main-parameters", "jax-adamw", "jax-sgd"],
)
@pytest.mark.world(1)
def test_optimizer_state_is_counted_for_every_optimizer(
    backend: str, options: dict[str, Any], moment: int, main: int
) -> None:
    with started(backend, **options) as engine:
        n = n_parameters(engine)
        (first,) = engine.memory()
        assert (first.optimizer.on_device, first.optimizer.missing) == (main * n, moment * n)
        engine.train_batch(local_batch(engine, global_batch()), loss)
        (second,) = engine.memory()
        assert second.optimizer == KindMemory((moment + main) * n)
        engine.offload()
        assert engine.memory()[0].optimizer == KindMemory(offloaded=(moment + main) * n)


@pytest.mark.parametrize("backend", layouts(1, also=("jax:d1",)))
def test_files_count_as_offloaded(backend: str, tmp_path: Path) -> None:
    with started(backend, offload_dir=str(tmp_path)) as engine:
        (before,) = engine.memory()
        engine.offload()
        (after,) = engine.memory()
        (folder,) = tmp_path.iterdir()
        assert (after.on_device, after.offloaded) == (0, before.on_device)
        assert after.offloaded == sum(file.stat().st_size for file in folder.iterdir())


@pytest.mark.parametrize(
    "backend", layouts(2, engine="fsdp", also=("fsdp:d2", "megatron:d2", "jax:d2"), but=("fsdp:c2", "fsdp:p2"))
)
def test_one_rank_alone_reads_its_memory_without_waiting_for_the_device(backend: str) -> None:
    with started(backend) as engine, mock.patch.object(platform, "synchronize", side_effect=AssertionError):
        if engine.control.rank == 0:
            assert isinstance(engine.memory()[0], EngineMemory)
        assert not engine.control.gather(0)[0]


def nbytes(tensors: Iterable[Tensor]) -> int:
    return sum((x.to_local() if isinstance(x, DTensor) else x).nbytes for x in tensors)
