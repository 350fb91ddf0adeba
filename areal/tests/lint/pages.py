"""Markdown pages: their fenced blocks, prose, links and headings."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Page:
    """A page.

    Args:
        path: absolute.
        name: relative to the repository.
    """

    path: Path
    name: str

    @cached_property
    def text(self) -> str:
        return self.path.read_text()

    @cached_property
    def prose(self) -> str:
        """The page with empty lines in place of its fenced blocks."""
        return FENCE.sub(lambda match: "\n" * match[0].count("\n"), self.text)

    def blocks(self, language: str) -> list[tuple[int, str]]:
        """Return the fenced blocks of a language, each with the line number of its first line of code, from 1."""
        return [
            (self.text.count("\n", 0, match.start(2)) + 1, match[2])
            for match in FENCE.finditer(self.text)
            if match[1] == language
        ]

    @property
    def links(self) -> list[tuple[int, str]]:
        """Return the targets of links, each with its line."""
        return [(self.prose.count("\n", 0, match.start()) + 1, match[1]) for match in LINK.finditer(self.prose)]

    @property
    def commands(self) -> list[str]:
        """Return inline code and shell blocks."""
        return [*CODE.findall(self.prose), *(code for _, code in self.blocks("sh"))]

    @property
    def anchors(self) -> set[str]:
        """Return the anchors of the headings."""
        return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in HEADING.findall(self.prose)}


def pages(root: Path) -> list[Page]:
    """Return the pages of a repository, without the API reference."""
    paths = [root / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")]
    paths += sorted((root / "docs").glob("*.md"))
    return [Page(path, path.relative_to(root).as_posix()) for path in paths if path.exists()]
