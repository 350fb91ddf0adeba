"""Checks of imports: layers, optional dependencies, and test modules, which no other module imports."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from areal.tests.lint.sources import ROOT, Sources, imported, run

LAYERS = {
    "entry_points": -1,
    "name_clash": -1,
    "api": 0,
    "utils": 1,
    "chat": 2,
    "engine": 2,
    "weight_sync": 3,
    "plan": 3,
    "inference": 4,
    "dispatch": 4,
    "trainer": 5,
    "tinker": 5,
    "recipes": 6,
    "cli": 7,
    "integrations": 7,
}
HOMES: dict[str, str | tuple[str, ...] | None] = {
    "megatron": "engine/megatron",
    "flash_attn": "engine/attention/kernels.py",
    "peft": "engine/lora",
    "jax": "engine/jax",
    "jaxlib": "engine/jax",
    "optax": "engine/jax",
    "ray": "dispatch/ray",
    "fastapi": ("tinker/api", "inference/gateway"),
    "starlette": ("tinker/api", "inference/gateway"),
    "uvicorn": ("cli", "inference/embedded_server.py", "inference/gateway"),
    "sqlalchemy": "tinker/service",
    "alembic": "tinker/service",
    "google": "tinker/api",
    "zstandard": "tinker/api",
    "prometheus_client": "tinker/api",
    "pyrage": "tinker/service/store/encryption.py",
    "tyro": "cli",
    "math_verify": "trainer/rewards/math_answer.py",
    "reasoning_gym": "trainer/rewards/reasoning_gym_score.py",
    "accelerate": None,
    "rich": None,
    "trl": "integrations/trl",
    "verl": "integrations/verl",
    "skyrl": "integrations/skyrl",
    "verifiers": "integrations/verifiers",
    "matplotlib": ("recipes/record/curves.py", "plan/scaling_picture.py"),
    "datasets": "recipes/data/saved_datasets.py",
    "tomli_w": "recipes/record/run_record.py",
    "wandb": "trainer/trackers/wandb.py",
    "mlflow": "trainer/trackers/mlflow.py",
}
"""Optional dependencies, each with the folder or file that may import it; ``None`` for those of examples and tests."""


def layers(files: Sources) -> Iterator[str]:
    """Imports point one way. Layers of one height do not import each other."""
    for source in files.library:
        own = source.module.partition("/")[0]
        layer = LAYERS.get(own)
        for line, module in imported(source) if layer is not None else ():
            names = module.split(".")
            other = LAYERS.get(names[1], 9) if names[0] == "areal" and len(names) > 1 else -1
            if other > layer or (other == layer and names[1] != own):
                yield source.at(line, f"{own} must not import {module}: layers are {', '.join(LAYERS)}")


def api(files: Sources) -> Iterator[str]:
    """The interface imports torch and pydantic only."""
    allowed = {"areal", "torch", "pydantic", *sys.stdlib_module_names}
    for source in files.library:
        for line, module in imported(source) if source.module.startswith("api/") else ():
            if module.split(".")[0] not in allowed:
                yield source.at(line, f"api must not import {module}: only torch and pydantic")


def optional_dependencies(files: Sources) -> Iterator[str]:
    """An optional dependency is imported in one folder. A framework brings those that its adapter imports."""
    for source in files.library:
        for line, module in imported(source):
            name = module.split(".")[0]
            homes = HOMES.get(name)
            homes = (homes,) if isinstance(homes, str) else homes or ()
            if name in HOMES and not source.module.startswith((*homes, "integrations/")):
                yield source.at(
                    line, f"{name} is optional: import it in {' or '.join(homes) or 'examples and tests'} only"
                )


def inside_functions(files: Sources) -> Iterator[str]:
    """Imports are at the top of a module."""
    for source in files.library:
        inner = [
            each.lineno
            for node in source.nodes
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            for each in ast.walk(node)
            if isinstance(each, ast.Import | ast.ImportFrom)
        ]
        for line in sorted(set(inner)):
            yield source.at(line, "an import inside a function: move it to the top of the module")


def step_without_adapters(files: Sources) -> Iterator[str]:
    """The step uses a protocol of adapters: adapters import the components."""
    step = ("engine/base.py", "engine/state.py", "engine/components.py")
    for source in files.library:
        for line, module in imported(source) if source.module in step else ():
            if module.startswith("areal.engine.lora"):
                yield source.at(line, f"the step must not import {module}")


def private_jax(files: Sources) -> Iterator[str]:
    """Two files use private modules of JAX."""
    homes = [f"engine/jax/runtime/{name}.py" for name in ("coordinator", "world")]
    for source in files.library:
        found = re.search(r"\bjax\._src\b|\bjaxlib\b", source.text)
        if found and source.module not in homes:
            line = source.text.count("\n", 0, found.start()) + 1
            yield source.at(line, f"private modules of JAX may be used in {' and '.join(homes)} only")


def test_modules(files: Sources) -> Iterator[str]:
    """A helper of several test modules is in a module whose name does not begin with ``test_``."""
    for source in files.python:
        for node in source.nodes:
            if isinstance(node, ast.ImportFrom):
                modules = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            else:
                continue
            for module in modules:
                parts = module.split(".")
                if parts[:2] == ["areal", "tests"] and _is_test_module(files, parts):
                    yield source.at(node.lineno, f"imports from the test module {module}: move the helper to a module")


def _is_test_module(files: Sources, parts: list[str]) -> bool:
    return parts[-1].startswith("test_") and files.root.joinpath(*parts).with_suffix(".py").exists()


CHECKS = (layers, api, optional_dependencies, inside_functions, step_without_adapters, private_jax, test_modules)


def offences(root: Path = ROOT) -> list[str]:
    return run(CHECKS, root)
