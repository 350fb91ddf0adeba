"""Checks of the design: hooks and verbs of the engines, assertions, and environment variables."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from areal.tests.lint.sources import ROOT, Source, Sources, run

HOOKS = ["_build", "_finalize_grads", "_forward_compute_mb"]
VERBS = ("forward_backward_batch", "train_batch", "eval_batch", "forward_batch", "forward_backward")
VERB_HOMES = ["api/engine.py", "dispatch/table.py", "engine/base.py"]
ENVIRONMENT_READERS = (
    "utils/distributed.py",
    "utils/platform.py",
    "cli/doctor/ranks.py",
    "inference/gateway/agent_program.py",
    "recipes/record/run_record.py",
)


def no_assert(files: Sources) -> Iterator[str]:
    """An assertion is removed by ``python -O``, and does not say what to do."""
    for source in files.library:
        for node in source.nodes:
            if isinstance(node, ast.Assert):
                yield source.at(node.lineno, "an assertion outside of the tests: raise an error that says what to do")


def no_isinstance_of_engines(files: Sources) -> Iterator[str]:
    """Code of all engines does not ask which one it has."""
    for source in files.library:
        for node in source.nodes:
            if (
                isinstance(node, ast.Call)
                and ast.unparse(node.func) in ("isinstance", "issubclass")
                and "Engine" in ast.unparse(node.args[1])
            ):
                yield source.at(node.lineno, "a test for the class of an engine: use its interface")


def verbs_are_implemented_once(files: Sources) -> Iterator[str]:
    """The interface declares each verb, the base engine implements it, and a group dispatches it. No engine overrides it.

    Verbs of the same names of the server, and of engines of other frameworks, are those of their interfaces.
    """
    homes: dict[str, list[str]] = {verb: [] for verb in VERBS}
    for source in files.library:
        for node in source.nodes if not source.module.startswith(("tinker/", "integrations/")) else ():
            if isinstance(node, ast.FunctionDef) and node.name in homes:
                homes[node.name].append(source.module)
                if source.module not in VERB_HOMES:
                    yield source.at(node.lineno, f"{node.name} is implemented in {', '.join(VERB_HOMES)} only")
    for verb, modules in homes.items():
        missing = set(VERB_HOMES) - set(modules)
        if missing:
            yield f"areal/{VERB_HOMES[0]}:1: {verb} is missing in {', '.join(sorted(missing))}"


def base_engine_has_three_hooks(files: Sources) -> Iterator[str]:
    """An engine implements these, and inherits the rest of a step."""
    base = next((source for source in files.library if source.module == "engine/base.py"), None)
    abstract = sorted(_abstract_methods(base, "BaseTrainEngine")) if base else []
    if abstract != HOOKS:
        yield f"areal/engine/base.py:1: abstract methods of BaseTrainEngine are {abstract}, expected {HOOKS}"


def _abstract_methods(source: Source, name: str) -> Iterator[str]:
    for node in source.tree.body:
        for method in node.body if isinstance(node, ast.ClassDef) and node.name == name else ():
            if isinstance(method, ast.FunctionDef) and any(
                getattr(decorator, "id", "") == "abstractmethod" for decorator in method.decorator_list
            ):
                yield method.name


def components_are_objects(files: Sources) -> Iterator[str]:
    """A function among the components of an engine would be a fourth hook."""
    for source in files.library:
        for node in source.tree.body if source.module == "engine/components.py" else ():
            for field in node.body if isinstance(node, ast.ClassDef) and node.name == "EngineComponents" else ():
                if isinstance(field, ast.AnnAssign) and "Callable" in ast.unparse(field.annotation):
                    yield source.at(field.lineno, f"{ast.unparse(field.target)} is a function, expected an object")


def environment_variables_are_not_state(files: Sources) -> Iterator[str]:
    """Environment variables are read where torchrun sets them, and never written."""
    for source in files.library:
        for node in source.nodes:
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv"):
                if ast.unparse(node.value) == "os" and source.module not in ENVIRONMENT_READERS:
                    yield source.at(node.lineno, f"reads the environment, as only {', '.join(ENVIRONMENT_READERS)} may")
                continue
            targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else []
            if any(ast.unparse(target).startswith("os.environ") for target in targets):
                yield source.at(node.lineno, "writes the environment: pass a value")


CHECKS = (
    no_assert,
    no_isinstance_of_engines,
    verbs_are_implemented_once,
    base_engine_has_three_hooks,
    components_are_objects,
    environment_variables_are_not_state,
)


def offences(root: Path = ROOT) -> list[str]:
    return run(CHECKS, root)
