"""Tests of the documentation: code blocks run, links, names and commands exist, pages stay short, quoted errors are real.

The ``python`` blocks of a page run in order in one namespace with ``model_dir``, a tiny model, in an empty working directory.
Each page has a separate namespace.
"""

from __future__ import annotations

import ast
import importlib.util
import pydoc
import re
import sys
import xml.etree.ElementTree
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

from areal.api import FinetuneSpec
from areal.engine.base import BaseTrainEngine
from areal.engine.registry import GROUP
from areal.tests.grid.models import model_dir
from areal.tests.harness.tiny import NEEDS_JAX
from areal.tinker.backends.registry import SAMPLING_GROUP, TRAINING_GROUP

GROUPS = (GROUP, SAMPLING_GROUP, TRAINING_GROUP)
ROOT = Path(__file__).parents[4]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
REFERENCE = sorted((ROOT / "docs" / "reference").glob("*.md"))
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]

FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
OUR_FILE = re.compile(r"(?:areal|docs|examples|benchmarks|\.ci)/[\w./-]*|[\w./-]+\.(?:py|md|toml)|Makefile|LICENSE")
OUR_NAME = re.compile(r"areal(?:\.\w+)+")
MAKE = re.compile(r"\bmake ([a-z][a-z-]*)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)

WORDS, COLUMNS = 1200, 100
"""Limits of a page, and of its lines outside of code and tables."""
LONGER = {"CHANGELOG.md"}
"""Pages that may be longer: the changelog grows."""

all_pages = pytest.mark.parametrize("page", PAGES, ids=NAMES)


def blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """Return the fenced blocks of a language, each with the line number of its first line of code, from 1."""
    text = page.read_text()
    return [
        (text.count("\n", 0, match.start(2)) + 1, match[2]) for match in FENCE.finditer(text) if match[1] == language
    ]


def prose(page: Path) -> str:
    """Return a page without its fenced blocks."""
    return FENCE.sub("", page.read_text())


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
        pytest.param(page, id=str(page.relative_to(ROOT)), marks=NEEDS_JAX if page.stem == "jax" else ())
        for page in PAGES
        if blocks(page, "python")
    ],
)
def test_code_blocks_run(page: Path, one_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)  # dataclasses and pickle look up the page's names there
    vars(module)["model_dir"] = model_dir("qwen3")
    for line, code in blocks(page, "python"):
        # Prepend empty lines, so that a traceback shows the line of the page.
        exec(compile("\n" * (line - 1) + code, str(page), "exec"), vars(module))


@all_pages
def test_links_resolve(page: Path) -> None:
    broken = []
    for link in LINK.findall(prose(page)):
        if link.startswith(("https://", "http://")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings."""
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in HEADING.findall(prose(page))}


@all_pages
def test_named_files_and_objects_exist(page: Path) -> None:
    words = CODE.findall(prose(page))
    files = [word for word in words if OUR_FILE.fullmatch(word) and not list(ROOT.glob(word.rstrip("/")))]
    names = [word for word in words if OUR_NAME.fullmatch(word) and word not in GROUPS and pydoc.locate(word) is None]
    assert not files + names


@all_pages
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = [*CODE.findall(prose(page)), *(code for _, code in blocks(page, "sh"))]
    assert not {target for command in commands for target in MAKE.findall(command)} - targets


@pytest.mark.parametrize("page", [*PAGES, *REFERENCE], ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_are_short(page: Path) -> None:
    lines = [line for line in prose(page).splitlines() if not line.startswith("|")]
    # A long link, image or path cannot be wrapped.
    assert not [line for line in lines if len(line) > COLUMNS and " " in line.strip() and not line.startswith("!")]


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in LONGER], ids=lambda page: page.name)
def test_pages_are_short(page: Path) -> None:
    assert len(page.read_text().split()) <= WORDS


def source_texts() -> list[str]:
    """Return all string literals of the package, with ``…`` for the values of f-strings."""
    texts = []
    for path in (ROOT / "areal").rglob("*.py"):
        if "tests" in path.relative_to(ROOT).parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(v.value if isinstance(v, ast.Constant) else "…" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return texts


def test_quoted_errors_are_in_the_source() -> None:
    texts = source_texts()
    page = ROOT / "docs" / "troubleshooting.md"
    quoted = [code.strip() for _, code in blocks(page, "text")]
    assert len(quoted) == page.read_text().count("\n### ") >= 20
    assert not [message for message in quoted if not any(message in text for text in texts)]


def test_the_figure_of_the_layers_names_real_folders() -> None:
    figure = xml.etree.ElementTree.parse(ROOT / "docs" / "figures" / "architecture.svg")
    texts = [text.text or "" for text in figure.iter("{http://www.w3.org/2000/svg}text")]
    folders = [text for text in texts if text.startswith("areal/")]
    within = [text for text in texts if re.fullmatch(r"[a-z_]+", text)]
    assert set(folders) == {f"areal/{path.name}" for path in (ROOT / "areal").iterdir() if is_package(path)}
    assert set(within) == {path.name for path in (ROOT / "areal" / "engine").iterdir() if is_package(path)}


def is_package(path: Path) -> bool:
    """Return True for a folder of sources, without tests."""
    return (path / "__init__.py").exists() and path.name != "tests"


def test_every_page_is_linked_from_the_index() -> None:
    linked = {link.partition("#")[0] for link in LINK.findall((ROOT / "docs" / "index.md").read_text())}
    assert {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"} <= linked


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a\n```python\nx = 1\n```\nb\n```sh\nmake test\n```\n", [(3, "x = 1\n")]), ("```toml\n[a]\n```\n", [])],
)
def test_code_blocks_are_extracted_with_line_numbers(
    tmp_path: Path, text: str, expected: list[tuple[int, str]]
) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    assert blocks(page, "python") == expected


def test_heading_anchors_match_link_targets(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One sentence: `W` and more\n\n## Two\n")
    assert anchors(page) == {"one-sentence-w-and-more", "two"}


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
