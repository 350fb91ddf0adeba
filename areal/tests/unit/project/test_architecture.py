"""Architecture at run time: signatures, exports, and what an import needs. ``areal/tests/lint`` checks what the sources show."""

from __future__ import annotations

import inspect
import subprocess
import sys

import areal
import areal.api
from areal.dispatch.table import TABLE
from areal.engine.base import BaseTrainEngine
from areal.tests.lint.design import VERBS
from areal.tests.lint.imports import HOMES

IMPORTED_WITH_API = {
    "annotated_types",
    "areal",
    "numpy",
    "pydantic",
    "pydantic_core",
    "torch",
    "torchdata",
    "typing_extensions",
    "typing_inspection",
}


def test_a_group_dispatches_every_verb() -> None:
    assert set(VERBS) <= set(TABLE)


def test_base_engine_signatures_equal_the_interface() -> None:
    interface = areal.api.TrainEngine
    verbs = [name for name, value in vars(interface).items() if inspect.isfunction(value) and not name.startswith("_")]
    assert len(verbs) > 18
    for name in verbs:
        assert inspect.signature(getattr(interface, name)) == inspect.signature(getattr(BaseTrainEngine, name)), name
        assert getattr(interface, name).__doc__, f"{name} has no docstring"


def test_api_exports_public_names() -> None:
    names = """
        LossFn LossWeightFn ProcessOutputFn TrainEngine MicroBatch MicroBatchList TokenOutputs StepOutput
        TrainEngineConfig OptimizerConfig FinetuneSpec SaveLoadMeta ParallelDims TopK Metric Batch MicroBatchSpec
        FSDPConfig MegatronConfig NamedTensor OptimStats Checkpointer
    """
    assert not [name for name in names.split() if not hasattr(areal.api, name)]


def test_package_exports_every_name_in_all() -> None:
    assert not [name for name in areal.__all__ if not hasattr(areal, name)]


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_of_api_and_data_loads_few_modules() -> None:
    """Beside ``torch``: about 120, of which the project's own are 49. They take 0.2 s."""
    code = """
import sys, torch
before = set(sys.modules)
import areal.api, areal.utils.data
new = set(sys.modules) - before
packages = {name.partition(".")[0] for name in new} - sys.stdlib_module_names
print(len(new), *sorted(name for name in packages if not name.startswith("_sysconfigdata")))
"""
    count, *packages = run(code).split()
    assert set(packages) <= IMPORTED_WITH_API
    assert int(count) < 200


def test_import_of_the_package_is_lazy() -> None:
    assert run("import sys, areal; print([m for m in ('torch', 'pydantic') if m in sys.modules])") == "[]"


def test_engines_import_without_optional_dependencies() -> None:
    code = f"""
from importlib.machinery import PathFinder
find = PathFinder.find_spec
def hide(name, path=None, target=None):
    return None if name.split(".")[0] in {tuple(HOMES)!r} else find(name, path, target)
PathFinder.find_spec = staticmethod(hide)
import areal.api, areal.utils.data, areal.engine.base, areal.dispatch
from areal import FSDPEngine, create_engine
print(FSDPEngine.__name__)
"""
    assert run(code).splitlines()[-1] == "FSDPEngine"
