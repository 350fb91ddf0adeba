"""A rank is killed in the middle of a save: the previous checkpoint stays, and the other ranks raise."""

import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from areal.api import SaveLoadMeta, TrainEngine
from areal.engine.checkpoint.atomic_dir import discard, open_draft, verify
from areal.engine.checkpoint.dcp import read_metadata, read_tensors
from areal.engine.checkpoint.run_state import read_state
from areal.engine.registry import engine_names
from areal.tests.dist.checkpoint.stages import at_stages
from areal.tests.grid.models import model_dir
from areal.tests.harness.limits import PROMPTLY
from areal.tests.harness.processes import needs_own_world, run_world
from areal.tests.harness.tiny import NEEDS_JAX, checkpointer_of, started
from areal.tests.harness.world import world
from areal.utils.distributed import RankLostError

STAGES = {
    "hf": ("draft opened", "tensor 0", "tensor 8", "prepared", "written", "all written", "published"),
    "dcp": ("draft opened", "prepared", "writing", "written", "reported", "all written", "finished", "published"),
}
ON_FIRST_RANK = ("all written", "finished", "published")
KILLS = [
    (backend, weight_format, asynchronous, stage)
    for backend in ("fsdp:d2", *(["megatron:p2"] if "megatron" in engine_names() else []))
    for weight_format, stages in STAGES.items()
    for i, stage in enumerate(stages)
    for asynchronous in ((False, True) if stage in ("written", "all written") else (i % 2 == 1,))
]
JAX_KILLS = [("jax:d2", "hf", False, "tensor 8"), ("jax:d2", "dcp", True, "written")]


def fill(engine: TrainEngine, value: float) -> None:
    """Set all weights of this rank to a value."""
    model: Any = engine._components.model
    if engine.dims.backend == "jax":
        model.params = {name: x * 0 + value for name, x in model.params.items()}
        return
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def save_and_be_killed(
    folder: str, backend: str, weight_format: Any, asynchronous: bool, stage: str, victim: int
) -> None:
    """Save weights that are all 1, then weights that are all 2; the second time the victim dies.

    The survivor records its error.
    """

    def die(reached: str) -> None:
        if reached == stage and world().rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)

    path = model_dir("qwen3")
    with started(backend, path=path) as engine, ExitStack() as stack:
        checkpointer = checkpointer_of(engine, path, max_file_bytes=12_000)
        for value in (1, 2):
            fill(engine, value)
            engine.set_version(value)
            if value == 2:
                stack.enter_context(at_stages(die))
                dist.barrier()
            start = time.monotonic()
            try:
                checkpointer.save(
                    SaveLoadMeta(Path(folder) / "saved", weight_format, asynchronous=asynchronous and value == 2)
                )
                checkpointer.wait()
            except RankLostError as error:
                Path(folder, "survivor").write_text(f"{time.monotonic() - start:.1f} {error}")
                os._exit(3)
    os._exit(4)


def read_back(path: Path, weight_format: str) -> tuple[dict[str, Tensor], int | None]:
    """Read all weights of a checkpoint, and the version, without a world."""
    verify(path)
    if weight_format == "hf":
        files = sorted(path.glob("*.safetensors"))
        return {name: tensor for file in files for name, tensor in load_file(file).items()}, None
    metadata = read_metadata(path)
    saved = metadata.state_dict_metadata
    model = {name: entry for name, entry in saved.items() if not name.startswith(("optim.", "optimizer."))}
    tensors = {name: torch.zeros(entry.size) for name, entry in model.items()}
    read_tensors(path, metadata, tensors)
    return tensors, read_state(path / "state.pt")["version"]


@needs_own_world
@pytest.mark.parametrize(
    ("backend", "weight_format", "asynchronous", "stage"),
    [*KILLS, *(pytest.param(*case, marks=[NEEDS_JAX]) for case in JAX_KILLS)],
)
def test_killed_rank_leaves_a_complete_checkpoint(
    backend: str, weight_format: str, asynchronous: bool, stage: str, tmp_path: Path
) -> None:
    victim = 0 if stage in ON_FIRST_RANK else 1
    ended = run_world(2, save_and_be_killed, str(tmp_path), backend, weight_format, asynchronous, stage, victim)
    codes = {victim: -signal.SIGKILL, 1 - victim: 3}
    assert {rank: end.code for rank, end in enumerate(ended)} == codes, "\n".join(end.output for end in ended)
    seconds, message = (tmp_path / "survivor").read_text().split(maxsplit=1)
    assert float(seconds) < PROMPTLY
    assert f"rank {victim} of 2 is gone" in message
    tensors, version = read_back(tmp_path / "saved", weight_format)
    # Once every rank has reported, the first rank publishes even if another one dies.
    possible = {"published": (2,), "reported": (1, 2)}.get(stage, (1,))
    result = next(iter(tensors.values())).flatten()[0].item()
    assert result in possible
    assert len(tensors) > 15
    assert all((tensor == result).all() for tensor in tensors.values())
    assert version in (None, result)
    (tmp_path / "survivor").unlink()
    discard(open_draft(tmp_path / "saved"))
    assert os.listdir(tmp_path) == ["saved"]


def save_with_four(folder: str, stage: str) -> None:
    """Kill rank 2 while weights are gathered. The survivors stay alive: each must raise without the end of another."""

    def die(reached: str) -> None:
        if reached == stage and world().rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    path = model_dir("qwen3")
    with started("fsdp:d4", path=path) as engine:
        start = time.monotonic()
        try:
            with at_stages(die):
                engine.save(SaveLoadMeta(Path(folder) / "saved"))
        except RuntimeError as error:
            Path(folder, f"survivor{world().rank}").write_text(f"{time.monotonic() - start:.1f} {error}")
        while time.monotonic() - start < 60 and len(list(Path(folder).glob("survivor*"))) < 3:
            time.sleep(0.1)
        engine.destroy()


@needs_own_world
def test_survivors_of_a_save_raise_independently(tmp_path: Path) -> None:
    ended = run_world(4, save_with_four, str(tmp_path), "tensor 8")
    assert [end.code for end in ended] == [0, 0, -signal.SIGKILL, 0], "\n".join(end.output for end in ended)
    said = [(tmp_path / f"survivor{rank}").read_text().split(maxsplit=1) for rank in (0, 1, 3)]
    assert all(float(seconds) < PROMPTLY for seconds, _ in said), said
    assert all("rank 2 of 4 is gone" in message for _, message in said), said
    assert all(not name.endswith("saved") for name in os.listdir(tmp_path))
