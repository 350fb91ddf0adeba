"""An engine from another package: it registers by entry point and passes the grid without any change to the tests."""

import importlib
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from areal.api import TrainEngineConfig
from areal.engine.registry import create_engine, engine_class, engine_names
from areal.tests.grid.agreement import assert_verbs_agree
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
@pytest.mark.parametrize(
    ("objective", "case", "cut"),
    [("terms", "zero_rank", "tokens24"), ("nll", "ragged", "tokens24"), ("nll", "family", "shared40")],
)
def test_engine_of_another_package_joins_the_grid(
    tmp_path: Path, world_size: int, objective: str, case: str, cut: str
) -> None:
    assert NAME not in engine_names()
    with installed(tmp_path):
        assert NAME in engine_names()
        assert Layout(f"{NAME}:d{world_size}") in all_layouts()
        layout = Layout(f"{NAME}:d{world_size}", options={NAME: {"async_reduce": cut == "shared40"}})
        for dtype in ("float64", "float32"):
            assert_verbs_agree(
                Cell(layout, family="gemma3_text", objective_name=objective, case_name=case, cut=cut, dtype=dtype)
            )


@pytest.mark.world(1)
@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"lora": {"rank": 2}}, "lora"),
        ({"activation_checkpointing": "full"}, "activation_checkpointing"),
        ({"init_from_scratch": True}, "init_from_scratch"),
        ({"grad_sync": "micro_batch"}, "grad_sync"),
        ({"offload_dir": "/nowhere"}, "offload_dir"),
        ({"moe": {"z_loss": 0.1}}, "moe.z_loss"),
        ({"fsdp": {"compile": True}}, "fsdp.compile"),
        ({"megatron": {"bucket_size": 7}}, "megatron.bucket_size"),
        ({NAME: {"bucket_size": 7}}, "bucket_size"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_options_of_an_engine_of_another_package(options: dict[str, Any], name: str, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"path": model_dir("qwen3"), "backend": f"{NAME}:d1"}
    with installed(tmp_path):
        with pytest.raises(ValueError, match=rf"{name}\b.*\breplica\b"):
            create_engine(TrainEngineConfig(**fields, **options))
        with pytest.raises(ValueError, match=rf"{name}\b.*\breplica\b"):
            engine_class(NAME)(TrainEngineConfig(**fields, **options))
        # Every engine can reduce gradients once per call.
        engine = create_engine(TrainEngineConfig(**fields, grad_sync="call", **{NAME: {"async_reduce": True}}))
        assert engine.config.replica.async_reduce
        # The section may be in a file that another engine reads, as long as it says nothing.
        create_engine(TrainEngineConfig(path=fields["path"], **{NAME: {}}))
        with pytest.raises(ValueError, match=r"replica.async_reduce = True with backend = 'fsdp:d1'"):
            create_engine(TrainEngineConfig(path=fields["path"], **{NAME: {"async_reduce": True}}))


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
