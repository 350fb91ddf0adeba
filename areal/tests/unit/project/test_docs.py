"""Documentation is correct: code blocks run, and every link, name and command on the pages exists.

The ``python`` blocks of a page run in order in one namespace, which contains ``model_dir``, a tiny model, in an empty
working directory. Each page has a separate namespace.
"""

from __future__ import annotations

import pydoc
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from areal.api import FinetuneSpec
from areal.engine.base import BaseTrainEngine
from areal.engine.registry import GROUP
from areal.tests.grid.models import model_dir

ROOT = Path(__file__).parents[4]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]

FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
OUR_FILE = re.compile(r"(?:areal|docs|examples|benchmarks|\.ci)/[\w./-]*|[\w./-]+\.(?:py|md|toml)|Makefile|LICENSE")
OUR_NAME = re.compile(r"areal(?:\.\w+)+")
MAKE = re.compile(r"\bmake ([a-z][a-z-]*)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)

all_pages = pytest.mark.parametrize("page", PAGES, ids=NAMES)


def blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """Return the fenced blocks of a language, each with its first line number, from 1."""
    text = page.read_text()
    return [
        (text.count("\n", 0, match.start(2)) + 1, match[2]) for match in FENCE.finditer(text) if match[1] == language
    ]


def prose(page: Path) -> str:
    """Return a page without its fenced blocks."""
    return FENCE.sub("", page.read_text())


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Change to an empty directory; afterwards destroy engines and process groups and reset global switches."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        pytest.skip("pages are for a process of its own")
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
    "page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: str(page.relative_to(ROOT))
)
def test_code_blocks_run(page: Path, one_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("page")
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
    """Return the anchors of a page's headings, as links write them."""
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in HEADING.findall(prose(page))}


@all_pages
def test_named_files_and_objects_exist(page: Path) -> None:
    words = CODE.findall(prose(page))
    files = [word for word in words if OUR_FILE.fullmatch(word) and not list(ROOT.glob(word.rstrip("/")))]
    names = [word for word in words if OUR_NAME.fullmatch(word) and word != GROUP and pydoc.locate(word) is None]
    assert not files + names


@all_pages
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = [*CODE.findall(prose(page)), *(code for _, code in blocks(page, "sh"))]
    assert not {target for command in commands for target in MAKE.findall(command)} - targets


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
