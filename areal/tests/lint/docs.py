"""Checks of the documentation: links, commands, lengths, quoted errors, and where each page is named."""

from __future__ import annotations

import ast
import re
import xml.etree.ElementTree
from collections.abc import Iterator
from pathlib import Path

from areal.tests.lint.pages import Page, pages
from areal.tests.lint.sources import ROOT, Sources, run

WORDS, COLUMNS = 1200, 100
"""Limits of a page, and of its lines outside of code and tables."""

LONGER = ("CHANGELOG.md", "docs/configuration.md")
"""Pages that may be longer: one grows, and one is generated."""

_SVG_TEXT = "{http://www.w3.org/2000/svg}text"


def links_resolve(files: Sources) -> Iterator[str]:
    """Links to files and headings of the repository."""
    for page in pages(files.root):
        for line, link in page.links:
            name, _, anchor = link.partition("#")
            target = (page.path.parent / name).resolve() if name else page.path
            if link.startswith(("https://", "http://")):
                continue
            if not target.exists() or (anchor and anchor not in Page(target, "").anchors):
                yield f"{page.name}:{line}: no file or heading {link}"


def make_targets_exist(files: Sources) -> Iterator[str]:
    """Commands ``make …``."""
    makefile = files.root / "Makefile"
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile.read_text(), re.MULTILINE)) if makefile.exists() else set()
    for page in pages(files.root):
        for target in {name for command in page.commands for name in re.findall(r"\bmake ([a-z][a-z-]*)", command)}:
            if target not in targets:
                yield f"{page.name}:1: the Makefile has no target {target}"


def lines_are_short(files: Sources) -> Iterator[str]:
    """Lines outside of code and tables. A long link, image or path cannot be wrapped."""
    reference = [Page(path, path.relative_to(files.root).as_posix()) for path in files.root.glob("docs/reference/*.md")]
    for page in (*pages(files.root), *reference):
        for number, line in enumerate(page.prose.splitlines(), 1):
            if len(line) > COLUMNS and " " in line.strip() and not line.startswith(("|", "!")):
                yield f"{page.name}:{number}: {len(line)} columns, and a line may have {COLUMNS}"


def pages_are_short(files: Sources) -> Iterator[str]:
    """Words of a page."""
    for page in pages(files.root):
        words = len(page.text.split())
        if words > WORDS and page.name not in LONGER:
            yield f"{page.name}:1: {words} words, and a page may have {WORDS}: make another page of a part"


def quoted_errors_exist(files: Sources) -> Iterator[str]:
    """The errors that ``docs/troubleshooting.md`` quotes are in the source."""
    texts = [text for source in files.library for node in source.nodes if (text := _text_of(node))]
    for page in pages(files.root):
        for line, message in page.blocks("text") if page.name == "docs/troubleshooting.md" else ():
            if not any(message.strip() in text for text in texts):
                yield f"{page.name}:{line}: no source has this error"


def pages_are_named(files: Sources) -> Iterator[str]:
    """Every page is linked from the index and from the README."""
    all_pages = {page.name: page for page in pages(files.root)}
    for name in ("docs/index.md", "README.md"):
        linked = (
            {Path(link.partition("#")[0]).name for _, link in all_pages[name].links} if name in all_pages else set()
        )
        for page in all_pages.values():
            if page.name.startswith("docs/") and page.name != "docs/index.md" and page.path.name not in linked:
                yield f"{name}:1: does not link {page.name}"


def index_is_the_navigation(files: Sources) -> Iterator[str]:
    """The tables of the index have the groups and the pages of the navigation, in its order."""
    site, index = files.root / "mkdocs.yml", files.root / "docs" / "index.md"
    if not (site.exists() and index.exists()):
        return
    expected: dict[str, list[str]] = {}
    group = ""
    for line in site.read_text().partition("\nnav:\n")[2].splitlines():
        if section := re.fullmatch(r"  - ([\w ]+):", line):
            group = section[1]
        elif page := re.fullmatch(r"      - ([\w-]+\.md)", line):
            name = {"contributing.md": "../CONTRIBUTING.md"}.get(page[1], page[1])
            expected.setdefault(group, []).append(name)
    parts = re.split(r"^### (.+)$", index.read_text().partition("## All pages")[2], flags=re.MULTILINE)
    rows = re.compile(r"^\| \[[^\]]*\]\(([^)]+)\)", re.MULTILINE)
    tables = {title: rows.findall(table) for title, table in zip(parts[1::2], parts[2::2], strict=True)}
    for title, names in expected.items():
        if tables.get(title) != names:
            yield f"docs/index.md:1: the table {title!r} must have {names}, as the navigation, and has {tables.get(title)}"


def figure_has_the_folders(files: Sources) -> Iterator[str]:
    """The figure of the layers names the folders of the package and of the engines."""
    path = files.root / "docs" / "figures" / "architecture.svg"
    if not path.exists():
        return
    texts = {text.text or "" for text in xml.etree.ElementTree.parse(path).iter(_SVG_TEXT)}
    packages = {source.path.parent for source in files.library if source.path.name == "__init__.py"}
    folders = {f"areal/{each.name}" for each in packages if each.parent == files.root / "areal"}
    engines = {each.name for each in packages if each.parent == files.root / "areal" / "engine"}
    named = (
        {text for text in texts if text.startswith("areal/")},
        {text for text in texts if re.fullmatch("[a-z_]+", text)},
    )
    for wrong in sorted((named[0] ^ folders) | (named[1] ^ engines)):
        yield f"docs/figures/architecture.svg:1: {wrong} is not both a folder and in the figure"


def _text_of(node: ast.AST) -> str:
    """Return a string literal, with ``…`` for the values of an f-string."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


CHECKS = (
    links_resolve,
    make_targets_exist,
    lines_are_short,
    pages_are_short,
    quoted_errors_exist,
    pages_are_named,
    index_is_the_navigation,
    figure_has_the_folders,
)


def offences(root: Path = ROOT) -> list[str]:
    return run(CHECKS, root)
