"""An engine from another package registers by entry point, is made by name, and passes the comparison that every engine passes."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import areal.tests.thirdparty as source
from areal.api import TrainEngineConfig
from areal.engine.base import BaseTrainEngine
from areal.engine.registry import create_engine, engine_class, engine_names
from areal.tests.cases import rows
from areal.tests.compare import assert_number, assert_rows, assert_step, assert_tensors
from areal.tests.dist.test_faults import explode, raised
from areal.tests.layouts import Cell, Layout
from areal.tests.running import running
from areal.tests.tiny import family_dir, loss

ENTRY_POINTS = """\
[areal.engines]
plain = thirdparty_engine:PlainEngine
broken = thirdparty_engine_that_needs:AnEngine
"""


@contextmanager
def installed(site: Path) -> Iterator[None]:
    """A distribution ``thirdparty-engine``, as pip would lay it down, on the path."""
    info = site / "thirdparty_engine-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: thirdparty-engine\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    shutil.copy(str(source.__file__), site / "thirdparty_engine.py")
    (site / "thirdparty_engine_that_needs.py").write_text("import a_package_that_is_not_there\n")
    sys.path.insert(0, str(site))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(site))
        sys.modules.pop("thirdparty_engine", None)
        importlib.invalidate_caches()


@pytest.mark.world(1)
def test_an_engine_of_another_package_is_found_by_name(tmp_path: Path) -> None:
    config = TrainEngineConfig(path=family_dir("qwen3"), backend="plain:d1")
    with pytest.raises(ValueError, match=r"no engine is called 'plain'; installed are .*'fsdp'"):
        create_engine(config)
    with installed(tmp_path):
        assert {"fsdp", "plain"} <= set(engine_names())
        engine = create_engine(config)
        assert type(engine).__module__ == "thirdparty_engine"
        assert isinstance(engine, BaseTrainEngine)
        with pytest.raises(ValueError, match=r"the plain engine has no d \(data parallel\)"):
            create_engine(TrainEngineConfig(path=config.path, backend="plain:d2"))
        with pytest.raises(ValueError, match=r"'broken' needs what is not installed .*a_package_that_is_not_there"):
            engine_class("broken")
    assert "plain" not in engine_names()


def test_it_is_short() -> None:
    assert len(Path(str(source.__file__)).read_text().splitlines()) < 100


@pytest.mark.world(1)
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
@pytest.mark.parametrize("objective", ["nll", "policy", "terms"])
@pytest.mark.parametrize("cut", ["tokens24", "mbs3"])
def test_it_agrees_with_the_reference(family: str, objective: str, cut: str, tmp_path: Path) -> None:
    cell = Cell(Layout("plain:d1"), family=family, objective_name=objective, case_name="starved", cut=cut)
    call = (cell.objective.loss_fn, cell.objective.weight_fn)
    family_dir(family)
    with installed(tmp_path), running(cell) as run:
        engine, batch, outputs = run.engine, run.batch(), cell.objective.outputs
        expected, expected_outputs = run.expected()
        assert_step(engine.eval_batch(batch, *call, outputs=outputs), expected, cell.tolerance)
        found = engine.forward_batch(batch, outputs=("logprobs",))
        lengths = [cell.case.lengths[i] for i in run.mine]
        assert_rows(rows(found, lengths), [expected_outputs["logprobs"][i] for i in run.mine], cell.tolerance)
        assert_step(engine.forward_backward(batch, *call, outputs=outputs), expected, cell.tolerance)
        assert_tensors(engine.named_gradients(), expected.gradients, cell.tolerance)
        assert_number(engine.optimizer_step().grad_norm, expected.grad_norm, cell.tolerance)
        # What the template gives, it gives to every engine.
        with raised(RuntimeError, "no such column", "all pending gradients were discarded"):
            engine.train_batch(batch, explode)
        assert engine.train_batch(batch, loss).update_successful
