"""Tests of the documentation: code blocks run, and named files and objects exist. ``areal/tests/lint/docs.py`` checks the text.

The ``python`` blocks of a page run in order in one namespace, in an empty working directory, with ``model_dir``, a tiny model, and
``tokenizer``, of single characters; a page that names ``chat_model_dir`` also has a model for it. Each page has a separate namespace. Blocks
of ``python ray`` and ``python tinker`` run in the tests of Ray and of the SDK. Of Python in ``text`` blocks, which does not run, the calls
are compared with the signatures.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import pydoc
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

from areal.api import FinetuneSpec
from areal.engine.base import BaseTrainEngine
from areal.engine.registry import GROUP
from areal.recipes.record.run_record import SETTINGS
from areal.tests.grid.models import model_dir
from areal.tests.harness.tiny import NEEDS_JAX
from areal.tests.lint.pages import CODE, Page, pages
from areal.tests.unit.chat.chat_models import write_chat_model
from areal.tests.unit.chat.templates import CHATML
from areal.tests.unit.chat.tokenizers import chat_tokenizer
from areal.tinker.backends.backend_registry import SAMPLING_GROUP, TRAINING_GROUP

GROUPS = (GROUP, SAMPLING_GROUP, TRAINING_GROUP)
ROOT = Path(__file__).parents[4]
PAGES = pages(ROOT)
OUR_FILE = re.compile(r"(?:areal|docs|examples|benchmarks|\.ci)/[\w./-]*|[\w./-]+\.(?:py|md|toml)|Makefile|LICENSE")
OUR_NAME = re.compile(r"areal(?:\.\w+)+")


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Run in an empty working directory, and restore engines, process group and switches of the process."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        pytest.skip("pages run in one process")
    had_group, engines = dist.is_initialized(), []
    initialize = BaseTrainEngine.initialize

    def remember(engine: BaseTrainEngine, spec: FinetuneSpec) -> None:
        engines.append(engine)
        initialize(engine, spec)

    monkeypatch.setattr(BaseTrainEngine, "initialize", remember)
    monkeypatch.chdir(tmp_path)
    yield
    for engine in engines:
        engine.destroy()
    torch.use_deterministic_algorithms(False)
    if dist.is_initialized() and not had_group:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.name, marks=NEEDS_JAX if page.path.stem == "jax" else ())
        for page in PAGES
        if page.blocks("python")
    ],
)
def test_code_blocks_run(page: Page, one_process: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)  # dataclasses and pickle look up the page's names there
    vars(module)["model_dir"] = model_dir("qwen3")
    vars(module)["tokenizer"] = chat_tokenizer(CHATML)
    if "chat_model_dir" in page.path.read_text():
        vars(module)["chat_model_dir"], _ = write_chat_model(tmp_path)
    for line, code in page.blocks("python"):
        # Prepend empty lines, so that a traceback shows the line of the page.
        exec(compile("\n" * (line - 1) + code, str(page.path), "exec"), vars(module))


def test_named_files_and_objects_exist() -> None:
    missing = []
    for page in PAGES:
        for word in CODE.findall(page.prose):
            our_file = OUR_FILE.fullmatch(word) and word != SETTINGS  # a file of a run
            no_file = our_file and not list(ROOT.glob(word.rstrip("/")))
            no_name = OUR_NAME.fullmatch(word) and word not in GROUPS and pydoc.locate(word) is None
            if no_file or no_name:
                missing.append(f"{page.name}: {word}")
    assert not missing


# ---- calls in blocks that do not run


def public_names() -> dict[str, str]:
    """Return the module of each public function and class of the package. A name is defined once.

    Adapters for other frameworks are left out: these are not installed here.
    """
    found = {}
    for path in (ROOT / "areal").rglob("*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if not {"tests", "integrations"} & set(module.split(".")):
            tree = ast.parse(path.read_text())
            found |= {node.name: module for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    return {name: module for name, module in found.items() if not name.startswith("_")}


def wrong_calls(code: str, names: dict[str, str]) -> list[str]:
    """Return the calls of public names that do not fit their signatures. Text that is not Python has none."""
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return []
    wrong = []
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names):
            continue
        signature = inspect.signature(getattr(importlib.import_module(names[node.func.id]), node.func.id))
        left_out = [arg for arg in node.args if isinstance(arg, ast.Starred) or getattr(arg, "value", None) is ...]
        bind = signature.bind_partial if left_out or any(word.arg is None for word in node.keywords) else signature.bind
        given = [arg for arg in node.args if arg not in left_out]
        try:
            bind(*given, **{word.arg: word for word in node.keywords if word.arg})
        except TypeError as error:
            wrong.append(f"{ast.unparse(node)}: {error}")
    return wrong


def test_calls_in_blocks_that_do_not_run_fit_the_signatures() -> None:
    names = public_names()
    shown = ("text", "python ray")
    found = [(page, code) for page in PAGES for language in shown for _, code in page.blocks(language)]
    assert sum(any(name in code for name in names) for _, code in found) > 10
    assert not [f"{page.name}: {call}" for page, code in found for call in wrong_calls(code, names)]


def test_wrong_calls_are_found() -> None:
    names = {"WorkerGroup": "areal.dispatch.group"}
    assert wrong_calls("WorkerGroup()", names)
    assert wrong_calls("WorkerGroup(config, workers, no_such=1)", names)
    assert not wrong_calls("WorkerGroup(config, workers)", names)
    assert not wrong_calls("WorkerGroup(...)", names)


def site(name: str) -> ModuleType:
    """Import a module of ``docs/site``, which only the documentation's dependencies can run."""
    pytest.importorskip("mkdocs")
    pytest.importorskip("griffe")
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "site" / f"{name}.py")
    if spec is None or spec.loader is None:
        raise FileNotFoundError(name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("on_github", "on_the_site"),
    [
        ("[a](docs/a.md#b)", "[a](a.md#b)"),
        ("[c](CONTRIBUTING.md)", "[c](contributing.md)"),
        ("[l](LICENSE)", "[l](LICENSE)"),
        ("[x](https://x.org/docs/a.md)", "[x](https://x.org/docs/a.md)"),
    ],
)
def test_links_of_root_pages_are_rewritten(on_github: str, on_the_site: str) -> None:
    assert site("root_pages").from_root(on_github) == on_the_site


def test_links_to_root_pages_are_rewritten() -> None:
    text = "[r](../README.md#a) [e](engines.md) [f](reference/index.md)"
    assert site("root_pages").from_docs(text) == "[r](overview.md#a) [e](engines.md) [f](reference/index.md)"


def test_code_in_tables_has_pipes() -> None:
    with_pipes = site("root_pages").with_pipes
    assert with_pipes(r"| `a\|b` | `c` |") == "| <code>a&#124;b</code> | `c` |"


def test_roles_become_links_or_code() -> None:
    rewrite = site("docstrings").rewrite_roles
    link = '<autoref identifier="areal.api.Batch" optional><code>areal.api.Batch</code></autoref>'
    assert rewrite("a :class:`~areal.api.Batch`, ``:class:``") == f"a {link}, ``:class:``"
    assert rewrite(":func:`unknown`") == "<code>unknown</code>"


@pytest.mark.parametrize(
    ("source", "default", "description"),
    [
        ("Field(default=1, gt=0, description='A ' 'number.')", "1", "A number."),
        ("Field(description='Required.')", None, "Required."),
        ("MoEConfig()", "MoEConfig()", None),
    ],
)
def test_pydantic_fields_have_descriptions(source: str, default: str | None, description: str | None) -> None:
    assert site("docstrings").field_parts(source) == (default, description)
