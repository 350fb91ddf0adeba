"""An engine from another package: it registers by entry point and passes the grid without any change to the tests."""

import importlib
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist

from areal.api import TrainEngineConfig
from areal.engine.registry import create_engine, engine_names
from areal.tests.dist.step.test_grid import test_every_verb_agrees_with_the_reference as agrees_with_the_reference
from areal.tests.grid.layouts import Cell, Layout, all_layouts
from areal.tests.grid.models import model_dir

PAGE = Path(__file__).parents[3] / "docs" / "adding-an-engine.md"
PACKAGE, NAME = "separate_engine", "replica"


def write_package(folder: Path) -> None:
    """Write the engine of the documentation as an installed package."""
    source = next(
        block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S) if "class ReplicaEngine" in block
    )
    (folder / PACKAGE).mkdir()
    (folder / PACKAGE / "__init__.py").write_text(source)
    info = folder / f"{PACKAGE}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[areal.engines]\n{NAME} = {PACKAGE}:ReplicaEngine\n")


@contextmanager
def installed(folder: Path) -> Iterator[None]:
    """Make the package importable, and remove it at the end."""
    if dist.get_rank() == 0:
        write_package(folder)
    dist.barrier()
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop(PACKAGE, None)
        importlib.invalidate_caches()


@pytest.mark.world(1, 2)
@pytest.mark.parametrize(("objective", "case"), [("terms", "zero_rank"), ("nll", "ragged")])
def test_engine_of_another_package_joins_the_grid(
    tmp_path: Path, world_size: int, objective: str, case: str
) -> None:
    assert NAME not in engine_names()
    with installed(tmp_path):
        assert NAME in engine_names()
        layout = Layout(f"{NAME}:d{world_size}")
        assert layout in all_layouts()
        for dtype in ("float64", "float32"):
            agrees_with_the_reference(
                Cell(
                    layout, family="gemma3_text", objective_name=objective, case_name=case, cut="tokens24", dtype=dtype
                )
            )


@pytest.mark.world(1)
def test_invalid_registrations_raise(tmp_path: Path) -> None:
    path = model_dir("qwen3")
    with pytest.raises(ValueError, match=r"no engine is called 'replica'; installed are .*'fsdp'"):
        create_engine(TrainEngineConfig(path=path, backend="replica:d1"))
    with installed(tmp_path):
        with pytest.raises(ValueError, match=r"the replica engine has no c \(context parallel\); it has d"):
            create_engine(TrainEngineConfig(path=path, backend="replica:c2"))
        (tmp_path / PACKAGE / "__init__.py").write_text("import what_is_not_installed\n")
        sys.modules.pop(PACKAGE, None)
        importlib.invalidate_caches()
        with pytest.raises(ValueError, match="needs what is not installed"):
            create_engine(TrainEngineConfig(path=path, backend="replica:d1"))
