"""Tests of the documentation: code blocks run, links, names and commands exist, pages stay short, quoted errors are real.

The ``python`` blocks of a page run in order in one namespace with ``model_dir``, a tiny model, in an empty working directory.
Each page has a separate namespace. Blocks of ``python ray`` and ``python tinker`` run in the tests of Ray and of the SDK. Of Python in
``text`` blocks, which does not run, the calls are compared with the signatures.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
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
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
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


def name_of(page: Path) -> str:
    """Return the name of a page below the root."""
    return str(page.relative_to(ROOT))


def test_links_resolve() -> None:
    broken = []
    for page in PAGES:
        for link in LINK.findall(prose(page)):
            if link.startswith(("https://", "http://")):
                continue
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                broken.append(f"{name_of(page)}: {link}")
    assert not broken


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings."""
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in HEADING.findall(prose(page))}


def test_named_files_and_objects_exist() -> None:
    missing = []
    for page in PAGES:
        for word in CODE.findall(prose(page)):
            no_file = OUR_FILE.fullmatch(word) and not list(ROOT.glob(word.rstrip("/")))
            no_name = OUR_NAME.fullmatch(word) and word not in GROUPS and pydoc.locate(word) is None
            if no_file or no_name:
                missing.append(f"{name_of(page)}: {word}")
    assert not missing


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        f"{name_of(page)}: make {target}"
        for page in PAGES
        for command in [*CODE.findall(prose(page)), *(code for _, code in blocks(page, "sh"))]
        for target in MAKE.findall(command)
        if target not in targets
    }
    assert not named


def test_lines_are_short() -> None:
    # A long link, image or path cannot be wrapped.
    long = [
        f"{name_of(page)}: {line}"
        for page in (*PAGES, *REFERENCE)
        for line in prose(page).splitlines()
        if len(line) > COLUMNS and " " in line.strip() and not line.startswith(("|", "!"))
    ]
    assert not long


def test_pages_are_short() -> None:
    counts = {name_of(page): len(page.read_text().split()) for page in PAGES if page.name not in LONGER}
    assert not {name: count for name, count in counts.items() if count > WORDS}


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


def linked(page: Path) -> set[str]:
    """Return the pages of ``docs`` to which a page links."""
    return {Path(link.partition("#")[0]).name for link in LINK.findall(page.read_text())}


def test_every_page_is_named_by_the_index_and_the_readme() -> None:
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert not pages - linked(ROOT / "docs" / "index.md")
    assert not pages - linked(ROOT / "README.md")


def test_table_of_the_index_is_grouped_as_the_navigation() -> None:
    navigation: dict[str, list[str]] = {}
    group = ""
    for line in (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2].splitlines():
        if section := re.fullmatch(r"  - ([\w ]+):", line):
            group = section[1]
        elif page := re.fullmatch(r"      - (?:.*: )?([\w/-]+\.md)", line):
            navigation.setdefault(group, []).append(page[1])
    table = (ROOT / "docs" / "index.md").read_text().partition("## All pages")[2]
    sections = re.split(r"^### (.+)$", table, flags=re.MULTILINE)
    grouped = {
        title: re.findall(r"^\| \[[^\]]*\]\(([^)]+)\)", rows, re.MULTILINE)
        for title, rows in zip(sections[1::2], sections[2::2], strict=True)
        if title in navigation
    }
    to_root = {"contributing.md": "../CONTRIBUTING.md"}
    del navigation["API reference"]
    pages = {title: [to_root.get(page, page) for page in found] for title, found in navigation.items()}
    assert grouped == pages


# ---- calls in blocks that do not run


def public_names() -> dict[str, str]:
    """Return the module of each public function and class of the package. A name is defined once."""
    found = {}
    for path in (ROOT / "areal").rglob("*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if "tests" not in module.split("."):
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
    found = [(page, code) for page in PAGES for language in shown for _, code in blocks(page, language)]
    assert sum(any(name in code for name in names) for _, code in found) > 10
    assert not [f"{name_of(page)}: {call}" for page, code in found for call in wrong_calls(code, names)]


def test_wrong_calls_are_found() -> None:
    names = {"WorkerGroup": "areal.dispatch.group"}
    assert wrong_calls("WorkerGroup()", names)
    assert wrong_calls("WorkerGroup(config, workers, no_such=1)", names)
    assert not wrong_calls("WorkerGroup(config, workers)", names)
    assert not wrong_calls("WorkerGroup(...)", names)


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
