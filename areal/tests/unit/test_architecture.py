"""What holds of the code as such: which way imports point, how long files and functions are, what imports cost and need."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import areal

ROOT = Path(areal.__file__).parent
LEVELS = {"api": 0, "utils": 1, "engine": 2, "trainer": 3, "dispatch": 3, "tinker": 4, "cli": 5}
"""Layers from below: a module imports from its own folder and from lower ones."""

SOURCES = sorted(path for path in ROOT.rglob("*.py") if "tests" not in path.relative_to(ROOT).parts)
EVERYTHING = sorted(ROOT.rglob("*.py"))

OPTIONAL = ("megatron", "flash_attn", "ray", "fastapi", "jax", "peft", "accelerate", "tyro", "rich", "matplotlib")
HOMES = {"megatron": "engine/megatron", "ray": "dispatch", "fastapi": "tinker", "jax": "engine/jax"}
"""Optional packages that one folder alone imports."""


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    return []


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_there_is_something_to_look_at() -> None:
    assert len(SOURCES) > 30
    assert {path.relative_to(ROOT).parts[0] for path in SOURCES} >= {"api", "utils", "engine"}


@pytest.mark.parametrize("path", SOURCES, ids=named)
def test_imports_point_one_way(path: Path) -> None:
    own = path.relative_to(ROOT).parts[0]
    if own == "__init__.py":
        return
    assert own in LEVELS, f"{own} has no layer yet"
    for node in ast.walk(tree(path)):
        assert not (isinstance(node, ast.ImportFrom) and node.level), f"line {node.lineno}: import by full name"
        for name in imported(node):
            parts = name.split(".")
            if parts[0] != "areal" or len(parts) == 1:
                continue
            assert parts[1] == own or LEVELS.get(parts[1], 99) < LEVELS[own], f"line {node.lineno}: {name}"


@pytest.mark.parametrize("path", SOURCES, ids=named)
def test_a_file_is_short_and_states_no_assertion(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400
    found = [node.lineno for node in ast.walk(tree(path)) if isinstance(node, ast.Assert)]
    assert not found, f"assert in lines {found}: raise a ValueError or RuntimeError"


@pytest.mark.parametrize("path", EVERYTHING, ids=named)
def test_a_function_fits_a_screen(path: Path) -> None:
    long = {f.name: (f.end_lineno or f.lineno) - f.lineno + 1 for f in functions(path)}
    assert not {name: lines for name, lines in long.items() if lines > 80}


@pytest.mark.parametrize("path", SOURCES, ids=named)
def test_nothing_is_imported_inside_a_function(path: Path) -> None:
    inner = [
        f"{function.name}: {', '.join(imported(node))}"
        for function in functions(path)
        for node in ast.walk(function)
        if imported(node)
    ]
    assert not inner


@pytest.mark.parametrize("path", SOURCES, ids=named)
def test_optional_packages_stay_in_their_folder(path: Path) -> None:
    for node in ast.walk(tree(path)):
        for name in imported(node):
            home = HOMES.get(name.split(".")[0])
            assert home is None or named(path).startswith(home), f"line {node.lineno}: {name} belongs to {home}"


@pytest.mark.parametrize("path", SOURCES, ids=named)
def test_the_environment_is_no_state(path: Path) -> None:
    """Variables are read where torchrun sets them; nothing is written to them."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "os.environ":
            assert named(path) in ("utils/distributed.py", "utils/platform.py"), f"line {node.lineno}"
        if isinstance(node, ast.Assign | ast.Delete):
            targets = [ast.unparse(target) for target in node.targets]
            assert not any(target.startswith("os.environ") for target in targets), f"line {node.lineno}"


def test_the_step_is_written_once() -> None:
    owners = [
        f"{named(path)}:{node.name}"
        for path in SOURCES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ClassDef)
        for member in node.body
        if isinstance(member, ast.FunctionDef) and member.name == "forward_backward_batch"
    ]
    assert owners == ["api/engine.py:TrainEngine", "engine/base.py:BaseTrainEngine"]
    loops = [
        named(path)
        for path in SOURCES
        for function in functions(path)
        if function.name in ("train_batch", "eval_batch", "forward_batch", "forward_backward")
    ]
    assert set(loops) == {"api/engine.py", "engine/base.py"}


def test_no_engine_is_told_apart_by_its_class() -> None:
    for path in SOURCES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
                assert "Engine" not in ast.unparse(node.args[1]), f"{named(path)}:{node.lineno}"


PUBLIC = {
    "areal.api": (
        "Batch Metric OptimStats StepOutput TokenOutputs TopK LossFn LossWeightFn Normalization ProcessOutputFn "
        "TrainEngine MicroBatch MicroBatchList MicroBatchSpec TrainEngineConfig OptimizerConfig FSDPConfig MegatronConfig "
        "FinetuneSpec SaveLoadMeta Checkpointer ParallelDims NamedTensor WeightSource"
    ),
    "areal.engine.base": "BaseTrainEngine",
    "areal.engine.parts": "EngineParts",
    "areal.engine.schedule": "Schedule SequentialSchedule",
    "areal.engine.registry": "create_engine",
    "areal": "create_engine FSDPEngine TrainEngineConfig OptimizerConfig MicroBatchSpec FSDPConfig FinetuneSpec ParallelDims SaveLoadMeta",
}
"""Names that stay, by module."""


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_are_there_and_documented(module: str) -> None:
    owner = importlib.import_module(module)
    for name in PUBLIC[module].split():
        value = getattr(owner, name)
        if inspect.isclass(value):
            assert value.__doc__, f"{module}.{name} has no docstring"
    assert owner.__doc__


def test_the_public_surface_is_as_designed() -> None:
    from areal.api import TrainEngine
    from areal.engine.base import BaseTrainEngine

    verbs = (
        "initialize destroy set_version microbatches global_sum global_weight forward_backward_batch forward_backward train_batch "
        "eval_batch forward_batch zero_grad optimizer_step set_lr named_tensors named_gradients save load offload onload"
    ).split()
    for name in verbs:
        designed, written = (inspect.signature(getattr(owner, name)) for owner in (TrainEngine, BaseTrainEngine))
        assert designed == written, name
        assert getattr(TrainEngine, name).__doc__, f"{name} has no docstring"
    assert BaseTrainEngine.__abstractmethods__ == {"_build", "_forward_compute_mb", "_finalize_grads"}


def run(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT.parent)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


IMPORT_COST = """
import time, torch
start = time.process_time()
import areal.api, areal.utils.data
print(time.process_time() - start)
import sys
print([name for name in ("transformers", "torch.distributed.fsdp", "areal.engine") if name in sys.modules])
"""


def test_contracts_and_data_are_cheap_to_import() -> None:
    """CPU time, so that what else runs on the machine does not count."""
    outputs = [run(IMPORT_COST).splitlines() for _ in range(3)]
    assert min(float(seconds) for seconds, _ in outputs) < 0.5
    assert outputs[0][1] == "[]"


def test_the_package_itself_imports_nothing_until_it_is_asked() -> None:
    code = "import sys, areal; print([m for m in sys.modules if m == 'torch' or m.startswith('areal.')]); areal.ParallelDims; "
    assert run(code + "print('torch' in sys.modules)").splitlines() == ["[]", "True"]
    assert run("import areal; print(sorted(areal.__all__) == sorted(dir(areal)), hasattr(areal, 'nothing'))") == "True False"


def test_engines_import_without_optional_packages() -> None:
    hidden = f"import sys; sys.modules.update(dict.fromkeys({OPTIONAL!r}))\n"
    code = "import areal, areal.api, areal.utils.data, areal.engine, areal.engine.base, areal.engine.registry; print(areal.FSDPEngine.__name__)"
    assert run(hidden + code) == "FSDPEngine"
