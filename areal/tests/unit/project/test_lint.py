"""Each check of ``python -m areal.tests.lint`` finds the offence in a small tree of files, and accepts the tree without it."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import areal.tests.lint
from areal.tests.lint import design, docs, imports, names, private_names, sizes
from areal.tests.lint.private_names import LISTED
from areal.tests.lint.sources import Check, Sources

Files = Mapping[str, str | None]

HOOKS = "".join(f"    @abstractmethod\n    def {name}(self): ...\n" for name in design.HOOKS)
BASE = f"class BaseTrainEngine:\n{HOOKS}"
VERBS = "class Verbs:\n" + "".join(f"    def {verb}(self): ...\n" for verb in design.VERBS)
HOMES = dict.fromkeys([f"areal/{home}" for home in design.VERB_HOMES], VERBS)
USES = "areal/engine/uses.py", "\n".join(LISTED)

INDEX = "## All pages\n\n### Train\n\n| page |\n|---|\n| [x]({0}.md) |\n| [y]({1}.md) |\n"
FIGURE = '<svg xmlns="http://www.w3.org/2000/svg"><text>areal/{}</text></svg>'

# Check -> files with an offence, its place, and the files that are different in the corrected tree; None removes a file.
CASES: dict[Check, tuple[Files, str, Files]] = {
    imports.layers: (
        {"areal/engine/a.py": "import torch\nfrom areal.trainer import b\n"},
        "areal/engine/a.py:2: ",
        {"areal/engine/a.py": "import torch\nfrom areal.utils import b\n"},
    ),
    imports.api: (
        {"areal/api/a.py": "import numpy\n"},
        "areal/api/a.py:1: ",
        {"areal/api/a.py": "import json\nimport torch\nimport pydantic\n"},
    ),
    imports.optional_dependencies: (
        {"areal/engine/a.py": "from jax import numpy\n"},
        "areal/engine/a.py:1: ",
        {"areal/engine/jax/a.py": "from jax import numpy\n", "areal/engine/a.py": ""},
    ),
    imports.inside_functions: (
        {"areal/engine/a.py": "async def f():\n    import json\n"},
        "areal/engine/a.py:2: ",
        {"areal/engine/a.py": "import json\n"},
    ),
    imports.step_without_adapters: (
        {"areal/engine/base.py": "from areal.engine.lora import a\n"},
        "areal/engine/base.py:1: ",
        {"areal/engine/base.py": "from areal.engine.components import a\n"},
    ),
    imports.private_jax: (
        {"areal/engine/jax/a.py": "import jax\n\nx = jax._src\n"},
        "areal/engine/jax/a.py:3: ",
        {"areal/engine/jax/a.py": "", "areal/engine/jax/runtime/world.py": "x = jax._src\n"},
    ),
    imports.test_modules: (
        {"areal/tests/test_a.py": "", "areal/tests/b.py": "\nfrom areal.tests.test_a import f\n"},
        "areal/tests/b.py:2: ",
        {"areal/tests/a.py": "", "areal/tests/b.py": "\nfrom areal.tests.a import f, test_g\n"},
    ),
    sizes.files_are_short: ({"examples/a.py": "x = 1\n" * 401}, "examples/a.py:401: ", {"examples/a.py": "x\n" * 400}),
    sizes.functions_are_short: (
        {"areal/a.py": "def f():\n" + "    x = 1\n" * 86},
        "areal/a.py:1: f has 86 lines",
        {"areal/a.py": "def f():\n" + "    x = 1\n" * 85},
    ),
    sizes.folders_are_small: (
        {f"areal/tests/{letter}.py": "" for letter in "abcdefghijklmnop"},
        "areal/tests/__init__.py:1: 16 modules",
        {"areal/tests/p.py": None, "areal/tests/more/p.py": ""},
    ),
    names.public_names_are_defined_once: (
        {"areal/a.py": "def f(): ...\n", "areal/b.py": "\nclass f: ...\n"},
        "areal/b.py:2: f is defined in areal/a.py too",
        {"areal/b.py": "\nclass _f: ...\n"},
    ),
    names.folders_are_described: (
        {"areal/__init__.py": '"""The library."""\n', "areal/a/__init__.py": '"""things"""\n', "areal/b/c.py": ""},
        "areal/b/__init__.py:1: ",
        {"areal/a/__init__.py": '"""Things."""\n', "areal/b/__init__.py": '"""Others:\n\nmore"""\n'},
    ),
    names.test_modules_have_different_names: (
        {"areal/tests/a/test_x.py": "", "areal/tests/b/test_x.py": "", "areal/tests/b/common.py": ""},
        "areal/tests/b/test_x.py:1: areal/tests/a/test_x.py has the same name",
        {"areal/tests/b/test_x.py": None, "areal/tests/b/test_y.py": "", "areal/tests/a/common.py": ""},
    ),
    design.no_assert: (
        {"areal/a.py": "x = 1\nassert x\n"},
        "areal/a.py:2: ",
        {"areal/a.py": "", "areal/tests/a.py": "assert 1\n"},
    ),
    design.no_isinstance_of_engines: (
        {"areal/a.py": "isinstance(x, FSDPEngine)\n"},
        "areal/a.py:1: ",
        {"areal/a.py": "isinstance(x, dict)\n"},
    ),
    design.verbs_are_implemented_once: (
        HOMES | {"areal/engine/jax/a.py": "class A:\n    def train_batch(self): ...\n"},
        "areal/engine/jax/a.py:2: train_batch is implemented in",
        {"areal/engine/jax/a.py": "", "areal/tinker/a.py": "def train_batch(): ...\n"},
    ),
    design.base_engine_has_three_hooks: (
        {"areal/engine/base.py": BASE + "    @abstractmethod\n    def _more(self): ...\n"},
        "areal/engine/base.py:1: ",
        {"areal/engine/base.py": BASE},
    ),
    design.components_are_objects: (
        {"areal/engine/components.py": "class EngineComponents:\n    hook: Callable[[], None]\n"},
        "areal/engine/components.py:2: hook is a function",
        {"areal/engine/components.py": "class EngineComponents:\n    hook: Hook\n"},
    ),
    design.environment_variables_are_not_state: (
        {"areal/utils/platform.py": "import os\nx = os.environ\nos.environ['A'] = '1'\n"},
        "areal/utils/platform.py:3: writes",
        {"areal/utils/platform.py": "import os\nx = os.environ['A']\n"},
    ),
    private_names.names_are_listed: (
        dict([USES]) | {"areal/a.py": "import torch\n\ntorch._no_such_name\n"},
        "areal/a.py:3: _no_such_name is private",
        {"areal/a.py": "x._my_own = torch._foreach_norm\nx._my_own\n"},
    ),
    private_names.listed_names_are_used: (
        {USES[0]: "\n".join(LISTED[1:])},
        f"{private_names.THIS}:1: no source uses {LISTED[0]}",
        dict([USES]),
    ),
    docs.links_resolve: (
        {"README.md": "# A\n\n[b](docs/b.md#two) [c](docs/c.md)\n", "docs/b.md": "# Two\n"},
        "README.md:3: no file or heading docs/c.md",
        {"docs/c.md": ""},
    ),
    docs.make_targets_exist: (
        {"README.md": "```sh\nmake tests\n```\n", "Makefile": "test: a\n"},
        "README.md:1: the Makefile has no target tests",
        {"README.md": "```sh\nmake test\n```\nand `make test`\n"},
    ),
    docs.lines_are_short: (
        {"README.md": f"a {'b' * 99}\n```text\na {'c' * 99}\n```\n| a {'d' * 99} |\n"},
        "README.md:1: 101 columns",
        {"README.md": f"a {'b' * 98}\n"},
    ),
    docs.pages_are_short: (
        {"README.md": "a " * 1201, "CHANGELOG.md": "a " * 1201},
        "README.md:1: 1201 words",
        {"README.md": "a " * 1200},
    ),
    docs.quoted_errors_exist: (
        {"docs/troubleshooting.md": "```text\nlr = … is wrong\n```\n", "areal/a.py": 'f"lr = {x} is right"\n'},
        "docs/troubleshooting.md:2: no source",
        {"areal/a.py": 'f"in a: lr = {x} is wrong, lower it"\n'},
    ),
    docs.pages_are_named: (
        {"README.md": "[a](docs/a.md)", "docs/index.md": "[b](b.md)", "docs/a.md": "", "docs/b.md": ""},
        "docs/index.md:1: does not link docs/a.md",
        {"README.md": "[a](docs/a.md) [b](docs/b.md#c)", "docs/index.md": "[a](a.md) [b](b.md)"},
    ),
    docs.index_is_the_navigation: (
        {"mkdocs.yml": "\nnav:\n  - Train:\n      - a.md\n      - b.md\n", "docs/index.md": INDEX.format("b", "a")},
        "docs/index.md:1: the table 'Train'",
        {"docs/index.md": INDEX.format("a", "b")},
    ),
    docs.figure_has_the_folders: (
        {"docs/figures/architecture.svg": FIGURE.format("api"), "areal/utils/__init__.py": ""},
        "docs/figures/architecture.svg:1: areal/api",
        {"docs/figures/architecture.svg": FIGURE.format("utils")},
    ),
}


def written(folder: Path, files: Files) -> Sources:
    for name, text in files.items():
        if text is None:
            continue
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Sources(folder)


@pytest.mark.parametrize("check", CASES, ids=lambda check: check.__name__)
def test_check_finds_the_offence_only(check: Check, tmp_path: Path) -> None:
    files, expected, corrected = CASES[check]
    found = list(check(written(tmp_path / "wrong", files)))
    assert any(offence.startswith(expected) for offence in found), found
    assert list(check(written(tmp_path / "corrected", files | corrected))) == []


def test_every_check_has_a_case() -> None:
    modules = [
        importlib.import_module(f"areal.tests.lint.{m.name}")
        for m in pkgutil.iter_modules(areal.tests.lint.__path__)
        if m.name != "__main__"
    ]
    assert {check for module in modules for check in getattr(module, "CHECKS", ())} == set(CASES)


def test_command_prints_offences_and_fails(tmp_path: Path) -> None:
    """In a copy of the checks beside a file with an assertion."""
    lint = Path(areal.tests.lint.__file__).parent
    copies = {f"areal/tests/lint/{path.name}": path.read_text() for path in lint.glob("*.py")}
    inits = dict.fromkeys(["areal/__init__.py", "areal/tests/__init__.py"], '"""A package."""\n')
    written(tmp_path, copies | inits | {"areal/a.py": "assert 1\n"})
    command = [sys.executable, "-m", "areal.tests.lint"]
    done = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    *offences, last = done.stdout.splitlines()
    assert done.returncode == 1, done.stderr
    assert "areal/a.py:1: an assertion outside of the tests: raise an error that says what to do" in offences
    assert last == f"{len(offences)} offences, {len(CASES)} checks, {len(copies) + 3} Python files"
