"""A hook of mkdocs that adds the pages of the repository's root to the site, and fits Markdown for GitHub to mkdocs.

README.md, CONTRIBUTING.md and CHANGELOG.md are where GitHub expects them, outside of ``docs/``. Links between them and the
pages of ``docs/`` are relative to the files, so that GitHub resolves them; this hook rewrites them for the site.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT_PAGES = {"README.md": "overview.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""File in the repository's root -> page of the site."""

_PIPE = re.compile(r"`([^`\n]*\\\|[^`\n]*)`")
_LINK = re.compile(r"\]\(([^)\s#]+)(#[^)\s]*)?\)")


def from_root(text: str) -> str:
    """Return a root page with its links as a page of ``docs/`` has them."""

    def rewrite(link: re.Match[str]) -> str:
        target = ROOT_PAGES.get(link[1], link[1].removeprefix("docs/"))
        return f"]({target}{link[2] or ''})"

    return _LINK.sub(rewrite, text)


def from_docs(text: str) -> str:
    """Return a page of ``docs/`` with links to root pages as the site has them."""

    def rewrite(link: re.Match[str]) -> str:
        target = ROOT_PAGES.get(link[1].removeprefix("../"), link[1])
        return f"]({target}{link[2] or ''})"

    return _LINK.sub(rewrite, text)


def with_pipes(text: str) -> str:
    """Return a page whose code in tables has pipes: GitHub reads ``\\|`` there as a pipe, mkdocs as two characters."""
    return _PIPE.sub(lambda code: "<code>" + code[1].replace("\\|", "&#124;") + "</code>", text)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the root pages and the licence that they link to."""
    root = Path(config.config_file_path).parent
    for name, page in ROOT_PAGES.items():
        files.append(File.generated(config, page, content=from_root((root / name).read_text())))
    files.append(File.generated(config, "LICENSE", content=(root / "LICENSE").read_text()))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Rewrite the links and tables of every page."""
    return with_pipes(from_docs(markdown))
