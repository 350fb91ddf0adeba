"""Guarantees of a world test, in the pool and under torchrun."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from areal.tests.grid.models import model_dir
from areal.tests.harness.world import cached, world


@pytest.mark.world(1, 2, 4)
def test_runs_on_every_rank(world_size: int) -> None:
    assert (world().rank, world().size) == (dist.get_rank(), dist.get_world_size())
    assert world_size == world().size
    total = torch.tensor(world().rank)
    dist.all_reduce(total)
    assert total.item() == world_size * (world_size - 1) // 2


@pytest.mark.world(1, 2, 4)
@pytest.mark.parametrize("letter", ["a", "b"])
def test_parameters_and_tmp_path_are_equal_on_all_ranks(letter: str, tmp_path: Path) -> None:
    (tmp_path / f"{letter}{world().rank}").touch()
    dist.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{letter}{rank}" for rank in range(world().size)]


@pytest.mark.world(1, 2, 4)
def test_cached_values_are_computed_once(tmp_path: Path) -> None:
    def compute() -> int:
        (tmp_path / str(world().rank)).touch()
        return 17

    assert cached("number", str(tmp_path), compute) == 17
    dist.barrier()
    assert len(list(tmp_path.iterdir())) == 1


class TestClass:
    @pytest.mark.world(2)
    def test_world_test_methods_run(self) -> None:
        assert dist.get_world_size() == 2


@pytest.mark.parametrize("size", [pytest.param(n, marks=pytest.mark.world(n), id=f"w{n}") for n in (1, 2)])
def test_world_mark_on_a_parameter(size: int) -> None:
    assert dist.get_world_size() == size


@pytest.mark.world(2)
def test_any_rank_can_create_a_model_directory_first() -> None:
    for rank in range(2):
        if world().rank == rank:
            assert (Path(model_dir("qwen3", seed=100 + rank)) / "model.safetensors").exists()
        dist.barrier()
