"""Architecture: import direction, sizes of files, functions and folders, and unique definitions."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import areal
import areal.api
from areal.dispatch.table import TABLE
from areal.engine.base import BaseTrainEngine
from areal.engine.components import EngineComponents

ROOT = Path(areal.__file__).parent
LAYERS = {
    "entry_points": -1,
    "name_clash": -1,
    "api": 0,
    "utils": 1,
    "engine": 2,
    "weight_sync": 3,
    "trainer": 4,
    "dispatch": 4,
    "tinker": 5,
    "cli": 6,
}
SOURCES = sorted(p for p in ROOT.rglob("*.py") if "tests" not in p.relative_to(ROOT).parts)
OPTIONAL = (
    "megatron",
    "flash_attn",
    "ray",
    "fastapi",
    "starlette",
    "uvicorn",
    "sqlalchemy",
    "alembic",
    "google",
    "zstandard",
    "prometheus_client",
    "jax",
    "jaxlib",
    "optax",
    "peft",
    "accelerate",
    "tyro",
    "rich",
    "matplotlib",
)


def trees(paths: list[Path]) -> Iterator[tuple[Path, ast.Module]]:
    for path in paths:
        yield path, ast.parse(path.read_text())


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and name of every imported module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, node.module or ""


def test_sources_are_collected() -> None:
    assert len(SOURCES) > 40


def test_imports_point_one_way() -> None:
    wrong = []
    for path, tree in trees(SOURCES):
        layer = LAYERS.get(path.relative_to(ROOT).parts[0])
        if layer is None:
            continue
        for line, module in imported(tree):
            names = module.split(".")
            other = LAYERS.get(names[1], 9) if names[0] == "areal" and len(names) > 1 else -1
            # Layers of one height do not know each other.
            if other > layer or (other == layer and names[1] != path.relative_to(ROOT).parts[0]):
                wrong.append(f"{path}:{line} imports {module}")
    assert not wrong


def test_api_imports_only_torch_and_pydantic() -> None:
    allowed = {"areal", "torch", "pydantic", *sys.stdlib_module_names}
    wrong = [
        f"{path}:{line} imports {module}"
        for path, tree in trees(sorted((ROOT / "api").rglob("*.py")))
        for line, module in imported(tree)
        if module.split(".")[0] not in allowed
    ]
    assert not wrong


def test_optional_dependencies_are_imported_only_in_their_folder() -> None:
    homes = {
        "megatron": "engine/megatron",
        "flash_attn": "engine/attention/kernels.py",
        "peft": "engine/lora",
        "jax": "engine/jax",
        "jaxlib": "engine/jax",
        "optax": "engine/jax",
        "ray": "dispatch/ray",
        "fastapi": "tinker/api",
        "starlette": "tinker/api",
        "uvicorn": "cli",
        "sqlalchemy": "tinker/engine",
        "alembic": "tinker/engine",
        "google": "tinker/api",
        "zstandard": "tinker/api",
        "prometheus_client": "tinker/api",
        "tyro": "cli",
    }
    wrong = [
        f"{path}:{line} imports {module}"
        for path, tree in trees(SOURCES)
        for line, module in imported(tree)
        if module.split(".")[0] in OPTIONAL
        and not str(path.relative_to(ROOT)).startswith(homes.get(module.split(".")[0], "nowhere"))
    ]
    assert not wrong


def test_files_have_at_most_400_lines() -> None:
    files = [
        *ROOT.rglob("*.py"),
        *(ROOT.parent / "examples").rglob("*.py"),
        *(ROOT.parent / "benchmarks").rglob("*.py"),
    ]
    long = {str(path): n for path in files if (n := len(path.read_text().splitlines())) > 400}
    assert not long


def test_folders_have_at_most_15_files() -> None:
    """Modules below ``areal/``, tests included, without ``__init__.py``."""
    files: dict[str, int] = defaultdict(int)
    for path in ROOT.rglob("*.py"):
        files[str(path.parent.relative_to(ROOT.parent))] += path.name != "__init__.py"
    crowded = {folder: n for folder, n in files.items() if n > 15}
    assert not crowded


def test_init_of_each_folder_describes_it() -> None:
    """The docstring begins with one sentence on what belongs to the folder."""
    folders = {path.parent for path in ROOT.rglob("*.py")}
    wrong = []
    for folder in sorted(folders):
        init = folder / "__init__.py"
        docstring = ast.get_docstring(ast.parse(init.read_text())) if init.exists() else None
        first_paragraph = (docstring or "").split("\n\n")[0]
        if not re.search(r"\w[.:]", first_paragraph):
            wrong.append(f"{init.relative_to(ROOT.parent)} begins with {first_paragraph!r}, not with a sentence")
    assert not wrong


def test_public_names_are_defined_once() -> None:
    """Public functions and classes at the top level of modules, tests not included."""
    files: dict[str, set[str]] = defaultdict(set)
    for path, tree in trees(SOURCES):
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                files[node.name].add(str(path.relative_to(ROOT)))
    repeated = {name: sorted(paths) for name, paths in files.items() if len(paths) > 1}
    assert not repeated


def test_functions_have_at_most_85_lines() -> None:
    long = [
        f"{path}:{node.lineno} {node.name}"
        for path, tree in trees(SOURCES)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno > 85
    ]
    assert not long


def test_no_assert_outside_tests() -> None:
    asserts = [f"{p}:{n.lineno}" for p, tree in trees(SOURCES) for n in ast.walk(tree) if isinstance(n, ast.Assert)]
    assert not asserts


def test_no_import_inside_a_function() -> None:
    wrong = [
        f"{path}:{inner.lineno}"
        for path, tree in trees(SOURCES)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        for inner in ast.walk(node)
        if isinstance(inner, ast.Import | ast.ImportFrom)
    ]
    assert not wrong


def test_each_verb_is_implemented_once() -> None:
    """The interface declares each verb, the base engine implements it, and a group dispatches it. No engine overrides it.

    The server's verbs of the same names are those of its protocol.
    """
    verbs = ("forward_backward_batch", "train_batch", "eval_batch", "forward_batch", "forward_backward")
    files: dict[str, list[str]] = {verb: [] for verb in verbs}
    for path, tree in trees([path for path in SOURCES if not path.is_relative_to(ROOT / "tinker")]):
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name in files:
                files[node.name].append(str(path.relative_to(ROOT)))
    homes = ["api/engine.py", "dispatch/verbs.py", "engine/base.py"]
    wrong = {verb: paths for verb, paths in files.items() if sorted(paths) != homes or verb not in TABLE}
    assert not wrong


def test_base_engine_has_three_abstract_hooks() -> None:
    tree = ast.parse((ROOT / "engine" / "base.py").read_text())
    template = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "BaseTrainEngine")
    abstract = [
        n.name
        for n in template.body
        if isinstance(n, ast.FunctionDef) and any(getattr(d, "id", "") == "abstractmethod" for d in n.decorator_list)
    ]
    assert sorted(abstract) == ["_build", "_finalize_grads", "_forward_compute_mb"]


def test_components_are_objects_and_not_functions() -> None:
    """A function among the components would be a fourth hook."""
    annotations = {field.name: str(field.type) for field in dataclasses.fields(EngineComponents)}
    assert not [name for name, annotation in annotations.items() if "Callable" in annotation]


def test_the_step_does_not_import_adapters() -> None:
    """It uses a protocol: adapters import the components."""
    wrong = [
        f"{path}:{line} imports {module}"
        for path, tree in trees([ROOT / "engine" / f"{name}.py" for name in ("base", "state", "components")])
        for line, module in imported(tree)
        if module.startswith("areal.engine.lora")
    ]
    assert not wrong


def test_base_engine_signatures_equal_the_interface() -> None:
    interface = areal.api.TrainEngine
    verbs = [name for name, value in vars(interface).items() if inspect.isfunction(value) and not name.startswith("_")]
    assert len(verbs) > 18
    for name in verbs:
        assert inspect.signature(getattr(interface, name)) == inspect.signature(getattr(BaseTrainEngine, name)), name
        assert getattr(interface, name).__doc__, f"{name} has no docstring"


def test_no_isinstance_on_engine_classes() -> None:
    wrong = [
        f"{path}:{node.lineno}"
        for path, tree in trees(SOURCES)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("isinstance", "issubclass")
        and "Engine" in ast.unparse(node.args[1])
    ]
    assert not wrong


def test_environment_variables_are_not_state() -> None:
    """Environment variables are read where torchrun sets them and passed on to processes of `areal doctor`, and never written."""
    readers, writes = set(), []
    for path, tree in trees(SOURCES):
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv", "os.putenv"):
                readers.add(str(path.relative_to(ROOT)))
            if isinstance(node, ast.Assign | ast.Delete):
                writes += [f"{path}:{node.lineno}" for t in node.targets if ast.unparse(t).startswith("os.environ")]
    assert readers <= {"utils/distributed.py", "utils/platform.py", "cli/doctor/ranks.py"}
    assert not writes


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


def test_import_of_api_and_data_is_fast() -> None:
    code = (
        "import time, torch, sys; start = time.process_time(); import areal.api, areal.utils.data; "
        "print(time.process_time() - start, 'transformers' in sys.modules)"
    )
    seconds: list[float] = []
    while len(seconds) < 3 and min(seconds, default=1.0) >= 0.5:  # on a busy machine, one import of three may be slow
        its_seconds, imports_transformers = run(code).split()
        seconds.append(float(its_seconds))
        assert imports_transformers == "False"
    assert min(seconds) < 0.5


def test_import_of_the_package_is_lazy() -> None:
    assert run("import sys, areal; print([m for m in ('torch', 'pydantic') if m in sys.modules])") == "[]"


def test_engines_import_without_optional_dependencies() -> None:
    code = f"""
from importlib.machinery import PathFinder
find = PathFinder.find_spec
def hide(name, path=None, target=None):
    return None if name.split(".")[0] in {OPTIONAL!r} else find(name, path, target)
PathFinder.find_spec = hide
import areal.api, areal.utils.data, areal.engine.base, areal.dispatch
from areal import FSDPEngine, create_engine
print(FSDPEngine.__name__)
"""
    assert run(code).splitlines()[-1] == "FSDPEngine"
