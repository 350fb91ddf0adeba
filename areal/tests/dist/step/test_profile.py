"""Step timings and profiles."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from areal.api import ParallelDims, StepOutput
from areal.tests.harness.tiny import global_batch, gradients_of, layouts, local_batch, loss, started
from areal.tests.harness.world import world

PHASES = ["data", "forward", "backward", "reduce", "optimizer"]
TIMED = ("fsdp:d1", "megatron:d1", "fsdp:d2", "fsdp:r2", "fsdp:p2", "megatron:d2", "megatron:t2", "megatron:p2")


def of(*backends: str) -> list[Any]:
    """Return a parameter for each layout, marked with its world size."""
    return [
        pytest.param(backend, id=backend, marks=pytest.mark.world(ParallelDims.parse(backend).world_size))
        for backend in backends
    ]


def error(step: StepOutput) -> float:
    """Return the relative difference between the sum of the phases and the step."""
    assert min(step.timings.values()) >= 0
    return abs(sum(step.timings.values()) / step.seconds - 1)


@pytest.mark.parametrize("backend", of(*TIMED))
def test_phases_sum_to_the_step(backend: str) -> None:
    with started(backend) as engine:
        errors, outside = [], []
        batch = local_batch(engine, [sample for seed in range(4) for sample in global_batch(seed)])
        for _ in range(3):  # another process may be scheduled between two lines, but not three times
            begin = time.perf_counter()
            step = engine.train_batch(batch, loss)
            outside.append(abs(step.seconds / (time.perf_counter() - begin) - 1))
            errors.append(error(step))
            assert list(step.timings) == PHASES
        assert min(errors) < 0.02
        if world().size == 1:
            assert min(outside) < 0.02
        # Equal on every rank, as are all fields of a step.
        assert len(set(engine.control.gather((step.seconds, *step.timings.values())))) == 1

        step = engine.forward_backward(local_batch(engine, global_batch()), loss)
        reduces = ["reduce"] if backend.startswith("fsdp") else []  # Megatron reduces in the optimizer step
        assert list(step.timings) == ["data", "forward", "backward", *reduces]
        assert error(step) < 0.5
        engine.optimizer_step()
        assert list(engine.eval_batch(local_batch(engine, global_batch()), loss).timings) == ["data", "forward"]


@pytest.mark.parametrize("backend", of("fsdp:d1", "megatron:d1"))
def test_loss_time_counts_as_forward_and_its_gradient_as_backward(backend: str) -> None:
    def slow(out: Any, batch: Any) -> Any:
        time.sleep(0.2)
        value = loss(out, batch)
        value.register_hook(lambda gradient: time.sleep(0.1))
        return value

    with started(backend) as engine:
        engine.train_batch(global_batch(), loss)  # the first call is slow anyway
        step = engine.train_batch(global_batch(), slow)
    assert step.timings["forward"] >= 0.2 * step.n_mbs
    assert step.timings["backward"] >= 0.1 * step.n_mbs
    assert step.seconds - step.timings["forward"] < step.seconds - 0.2 * step.n_mbs + 1e-9


@pytest.mark.world(2)
def test_timings_are_those_of_the_slowest_rank() -> None:
    with started("fsdp:d2") as engine:
        dist.barrier()
        if world().rank == 1:
            time.sleep(1.0)
        step = engine.train_batch(local_batch(engine, global_batch()), loss)
    # The other rank waited a second for the batch of this one, or half of it where its processor was taken.
    assert step.seconds >= 0.5
    assert step.timings["data"] >= 0.5


def ranges_in(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    return [event for event in events if event.get("cat") == "user_annotation"]


@pytest.mark.parametrize("backend", layouts(1, 2, also=("fsdp:p2",)))
def test_profile_has_phases_and_memory(backend: str, tmp_path: Path) -> None:
    with started(backend) as engine, started(backend) as plain:
        batch = local_batch(engine, global_batch())
        losses = [plain.train_batch(batch, loss).loss for _ in range(3)]
        result = [engine.train_batch(batch, loss).loss]
        with engine.profile(tmp_path / "new" / "folder") as folders:
            step = engine.train_batch(batch, loss)
        assert folders == {world().rank: tmp_path / "new" / "folder"}
        result += [step.loss, engine.train_batch(batch, loss).loss]
        assert result == losses
        engine.forward_backward(batch, loss)
        gradients = sum(x.numel() * x.element_size() for x in gradients_of(engine).values())
        engine.control.gather(None)
    folder, rank = tmp_path / "new" / "folder", world().rank
    assert len(list(folder.glob("trace-rank*.json.gz"))) == world().size
    names = {event["name"] for event in ranges_in(folder / f"trace-rank{rank}.json.gz")}
    assert names >= {"data", "schedule", "reduce", "optimizer"}
    for mb in range(step.n_mbs):
        assert names >= {f"forward mb {mb}", f"backward mb {mb}"}
    content = json.loads((folder / f"memory-rank{rank}.json").read_text())
    phases = {phase.split(" ")[0] for _, _, phase in content["points"]}
    assert phases >= {"data", "forward", "backward", "optimizer"}
    peak = max(allocated for _, allocated, _ in content["points"])
    assert content["peak"]["bytes"] == peak
    if backend == "fsdp:d1":  # in other layouts a rank has only a shard of them, or they are in preallocated buffers
        assert peak >= gradients


@pytest.mark.world(1)
def test_profile_nests_reductions_and_schedule(tmp_path: Path) -> None:
    with started("fsdp:d1") as engine, engine.profile(tmp_path, memory=False):
        step = engine.train_batch(global_batch(), loss)
    assert not list(tmp_path.glob("memory*"))
    result = ranges_in(tmp_path / "trace-rank0.json.gz")

    def spans(name: str) -> list[tuple[float, float]]:
        return [(event["ts"], event["ts"] + event["dur"]) for event in result if event["name"] == name]

    (last,) = spans(f"backward mb {step.n_mbs - 1}")
    assert sum(last[0] <= begin and end <= last[1] for begin, end in spans("reduce")) >= 3
    (schedule,) = spans("schedule")
    for begin, end in spans("data"):
        assert end <= schedule[0] or begin >= schedule[1]


@pytest.mark.world(1)
def test_error_inside_profile_keeps_profile_and_engine(tmp_path: Path) -> None:
    def wrong(out: Any, batch: Any) -> Any:
        raise ValueError("mine")

    with started("fsdp:d1") as engine, started("megatron:d1") as other:
        with pytest.raises(ValueError, match="mine"), engine.profile(tmp_path):
            engine.train_batch(global_batch(), wrong)
        assert "schedule" in {event["name"] for event in ranges_in(tmp_path / "trace-rank0.json.gz")}
        assert (tmp_path / "memory-rank0.json").exists()
        with engine.profile(tmp_path / "again"):
            for nested in (engine, other):
                with pytest.raises(RuntimeError, match="profiler is on already"), nested.profile(tmp_path / "nested"):
                    pass
            engine.train_batch(global_batch(), loss)
        assert not (tmp_path / "nested").exists()
        assert "optimizer" in {event["name"] for event in ranges_in(tmp_path / "again" / "trace-rank0.json.gz")}


@pytest.mark.world(1)
def test_unwritable_profile_folder_raises(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with started("fsdp:d1") as engine:
        for folder in (tmp_path / "file", tmp_path / "file" / "below"):
            with pytest.raises(ValueError, match=f"folder = '{folder}'"), engine.profile(folder):
                pass
        assert not torch.autograd._profiler_enabled()
    with pytest.raises(RuntimeError, match="cannot be used"):
        engine.profile(tmp_path)
