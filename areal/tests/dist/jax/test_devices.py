"""Several devices in one process: parity with the reference, checkpoints that move, memory, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from areal.api import FinetuneSpec, MicroBatchSpec, SaveLoadMeta
from areal.dispatch import WorkerGroup
from areal.engine.registry import create_engine
from areal.tests.dist.checkpoint.checkpoints import contents
from areal.tests.dist.dispatch.results import weights_in
from areal.tests.grid.agreement import assert_verbs_agree
from areal.tests.grid.layouts import Cell, Layout
from areal.tests.harness.engine_bytes import bytes_on_device
from areal.tests.harness.processes import needs_own_world, succeed
from areal.tests.harness.tiny import (
    NEEDS_JAX,
    config,
    family_dir,
    global_batch,
    gradients_of,
    local_batch,
    loss,
    same_bits,
    started,
    weights_of,
)
from areal.tests.harness.world import take_records

pytestmark = [needs_own_world, NEEDS_JAX]

TIMEOUT = 240.0
"""Seconds of a test's processes. On a busy machine, compiling takes minutes."""


def section(devices: int) -> dict[str, Any]:
    return {"jax": {"devices_per_process": devices}}


# ---- parity

ONE_PROCESS: dict[str, tuple[int, dict[str, str]]] = {
    "jax:d8": (8, {"case_name": "zero_rank"}),
    "jax:d4t2": (8, {"objective_name": "terms", "cut": "tokens64"}),
    "jax:d2c2t2": (8, {"objective_name": "policy", "cut": "mbs3"}),
    "jax:r2d4": (8, {"objective_name": "sequence", "dtype": "float32", "options": "recompute"}),
    "jax:d4e2": (8, {"family": "qwen3_moe", "cut": "tokens24"}),
    "jax:(attn:d2t2|ffn:d2e2)": (4, {"family": "qwen3_moe"}),
    "jax:t4": (4, {"objective_name": "value"}),
    "jax:d2c2": (4, {"objective_name": "distill", "case_name": "starved", "dtype": "float32"}),
    "jax:r2d2": (4, {"case_name": "family", "cut": "shared40", "objective_name": "policy"}),
    "jax:d4": (4, {"options": "lora", "cut": "tokens64"}),
}
"""Devices of the one process, and the fields of the cell."""

TWO_PROCESSES: dict[str, tuple[int, dict[str, str]]] = {
    "jax:d4": (2, {"case_name": "starved", "empty_rank": "last"}),
    "jax:d2t2": (2, {"cut": "tokens64", "objective_name": "terms"}),
    "jax:t4": (2, {"objective_name": "policy"}),
    "jax:c2t2": (2, {"cut": "tokens64"}),
    "jax:r2d2": (2, {"options": "lora"}),
}
"""The same for two processes. In ``t4`` and ``c2t2``, a stream is on both."""


def agree(backend: str, devices: int, fields: dict[str, str]) -> None:
    assert_verbs_agree(Cell(Layout(backend, options=section(devices)), **fields))
    print(take_records())


@pytest.mark.parametrize("backend", ONE_PROCESS)
def test_ranks_in_one_process_agree_with_the_reference(backend: str) -> None:
    succeed(1, agree, backend, *ONE_PROCESS[backend], timeout=TIMEOUT)


@pytest.mark.parametrize("backend", TWO_PROCESSES)
def test_ranks_in_two_processes_agree_with_the_reference(backend: str) -> None:
    succeed(2, agree, backend, *TWO_PROCESSES[backend], timeout=TIMEOUT)


# ---- micro-batches


def compute_in_streams() -> None:
    """Compare engines of four devices with one of them."""
    batch, spec = global_batch(), MicroBatchSpec(max_tokens_per_mb=40)
    with started("jax:d4", mb_spec=spec, **section(4)) as engine:
        assert (engine.dp_rank, engine.dp_size, engine.is_main) == (0, 1, True)
        mbs = engine.microbatches(batch)
        # 113 tokens: four streams hold them, of which none is longer than the budget.
        assert [len(mb.streams) for mb in mbs] == [4]
        assert all(stream.n_tokens <= 40 for mb in mbs for stream in mb.streams)
        few = engine.forward_batch(batch[:2])
        step = engine.forward_backward(batch, loss)
        gradients, rows = gradients_of(engine), engine.forward_batch(batch)
    # One engine of a process may use the first of its devices only.
    with started("jax:d1", mb_spec=spec) as engine:
        alone = engine.forward_backward(batch, loss)
        assert alone.loss == pytest.approx(step.loss, rel=1e-5)
        for name, expected in gradients_of(engine).items():
            torch.testing.assert_close(gradients[name], expected, atol=1e-5, rtol=1e-4)
        for found, expected in zip([*rows, *few], engine.forward_batch([*batch, *batch[:2]]), strict=True):
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_budget_is_that_of_a_device() -> None:
    succeed(1, compute_in_streams, timeout=TIMEOUT)


# ---- state


def move(backend: str, devices: int, read: str | None, write: str) -> None:
    """Take two steps, or load a checkpoint, and save."""
    options = section(devices) if backend.startswith("jax") else {}
    with started(backend, path=family_dir("qwen3_tied"), **options) as engine:
        if read is None:
            for seed in (1, 2):
                engine.train_batch(local_batch(engine, global_batch(seed)), loss)
        else:
            engine.load(SaveLoadMeta(read, weight_format="dcp"))
        engine.save(SaveLoadMeta(write, weight_format="dcp"))
        engine.save(SaveLoadMeta(f"{write}-hf", weight_format="hf"))


def test_checkpoints_move_between_numbers_of_devices_bit_for_bit(tmp_path: Path) -> None:
    chain = [
        (1, "jax:d4", 4),
        (2, "jax:d4", 2),
        (1, "jax:d2t2", 4),
        (2, "jax:d2", 1),
        (1, "fsdp:d1", 1),
        (1, "jax:d4", 4),
    ]
    read, expected = None, dict[str, Tensor]()
    for number, (processes, backend, devices) in enumerate(chain):
        write = str(tmp_path / str(number))
        succeed(processes, move, backend, devices, read, write, timeout=TIMEOUT)
        saved = {**contents(Path(write)), **weights_in(Path(f"{write}-hf"))}
        expected, read = expected or saved, write
        assert same_bits(saved, expected), f"{backend} of {processes} processes"
    assert any(key.endswith("exp_avg_sq") and x.any() for key, x in expected.items())


def keep_state(folder: str) -> None:
    """Move the state of replicas on devices of one process out and in, and draw random weights."""
    batch = global_batch()
    with started("jax:r2d2", offload_dir=folder, **section(4)) as engine:
        (empty,) = engine.memory()
        assert empty.optimizer.missing == 2 * empty.params.on_device
        engine.train_batch(batch, loss)
        engine.forward_backward(batch, loss)
        (before,), weights, gradients = engine.memory(), weights_of(engine), gradients_of(engine)
        by_kind = bytes_on_device(engine)
        assert by_kind == {kind: getattr(before, kind).on_device for kind in by_kind}
        engine.offload()
        (away,) = engine.memory()
        # One of two replicas is kept.
        assert away.on_device == 0
        assert 0 < away.offloaded < before.on_device * 0.6
        assert sum(bytes_on_device(engine).values()) == 0
        engine.onload()
        assert engine.memory() == [before]
        assert same_bits(weights_of(engine), weights)
        assert same_bits(gradients_of(engine), gradients)
    drawn: dict[str, Any] = {"path": family_dir("qwen3"), "init_from_scratch": True, "seed": 5}
    with started("jax:d2t2", **drawn, **section(4)) as engine, started("fsdp:d1", **drawn) as other:
        assert same_bits(weights_of(engine), weights_of(other))


def test_state_of_all_devices_is_counted_and_moved(tmp_path: Path) -> None:
    succeed(1, keep_state, str(tmp_path), timeout=TIMEOUT)


# ---- what is refused


def refuse() -> None:
    """Ask for devices that do not exist, in a process whose backend has two."""

    def start(backend: str, devices: int, match: str) -> None:
        with pytest.raises(ValueError, match=match), create_engine(config(backend, **section(devices))) as engine:
            engine.initialize(FinetuneSpec(total_train_steps=1))

    start("jax:d3", 2, r"devices_per_process = 2 with backend = 'jax:d3': .* choose a number that divides")
    start("jax:d2", 4, r"devices_per_process = 4 with backend = 'jax:d2': the layout has 2 ranks")
    start("jax:d2t3", 2, r"some of the ranks of tp = 3")
    start(
        "jax:d4",
        2,
        r"takes 4 ranks, but the world has 2, 1 processes with devices_per_process = 2: 'jax:d2' would fit, or start 2",
    )
    with started("jax:d2", **section(2)):
        pass
    start(
        "jax:d4",
        4,
        r"jax.devices_per_process = 4, but JAX has 2 cpu devices in this process: set it to 2, or on CPUs create",
    )
    with pytest.raises(ValueError, match="has 4 ranks in 2 processes, and the executor 1 processes"):
        WorkerGroup(config("jax:d4", **section(2)))
    group = WorkerGroup(config("jax:d2", **section(2)))
    group.initialize(FinetuneSpec(total_train_steps=1))
    assert group.train_batch(global_batch(), loss).n_tokens > 0
    group.destroy()


def test_wrong_numbers_of_devices_are_refused() -> None:
    succeed(1, refuse, timeout=TIMEOUT)


def refuse_in_a_world() -> None:
    """The second process has another backend already."""
    with started("jax:d2"):
        pass
    engine = create_engine(config("jax:d4", **section(2)))
    with pytest.raises(ValueError, match=r"jax.devices_per_process = 2, but JAX has 1 cpu devices"):
        engine.initialize(FinetuneSpec(total_train_steps=1))
    engine.destroy()


def test_wrong_numbers_of_devices_are_refused_on_every_rank() -> None:
    succeed(2, refuse_in_a_world, timeout=TIMEOUT)
