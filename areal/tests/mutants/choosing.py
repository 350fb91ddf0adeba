"""Choice of the bugs to plant: all, those that a change touches, a part of the others that the commit draws, or some by name."""

from __future__ import annotations

import hashlib
import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from areal.tests.mutants.finding import files_of
from areal.tests.mutants.planting import Mutant

ROOT = Path(__file__).parents[3]

TOUCHED = 1 / 24
"""Part of all bugs that are planted at most because a change touches them: a change of many files costs no more."""


@dataclass(frozen=True)
class Choice:
    """Bugs to plant, and a line that says why these."""

    names: tuple[str, ...]
    text: str


def choose(selection: str, mutants: Mapping[str, Mutant], root: Path = ROOT) -> Choice:
    """Choose bugs.

    Args:
        selection: comma-separated: names; ``all``; ``changed``, those that the last commit or an uncommitted change touches, or
            ``changed:REF``, those that a change since ``REF`` touches; ``K/N``, the ``K``-th of ``N`` parts of the others.
        mutants: all bugs by name.
        root: the checkout. Without its history no bug is touched.

    Raises:
        ValueError: a name that no bug has, or a part that is none.
    """
    named, touched, rest, reasons = set(), set(), set(), []
    commit = _git(root, "rev-parse", "HEAD").strip()
    words = [word for word in selection.split(",") if word]
    # Parts come last: they are parts of what nothing else chooses.
    for word in sorted(words, key=lambda word: bool(re.fullmatch(r"\d+/\d+", word))):
        if word == "all":
            named |= set(mutants)
        elif word == "changed" or word.startswith("changed:"):
            base = word.partition(":")[2] or "HEAD^1"
            changed = changed_files(base, root)
            if changed is None:
                reasons.append(f"no history since {base}")
                continue
            touched = {name for name, each in mutants.items() if changed & files_that_concern(each)}
            kept = sorted(touched, key=lambda name: _draw(commit, name))[: int(len(mutants) * TOUCHED)]
            reasons.append(f"{len(kept)} of {len(touched)} that changes since {base} touch")
            touched = set(kept)
        elif re.fullmatch(r"\d+/\d+", word):
            part, parts = map(int, word.split("/"))
            if not 0 < part <= parts:
                raise ValueError(f"{word} is no part of the bugs: K/N needs 0 < K <= N")
            others = [name for name in mutants if name not in named | touched]
            rest |= set(sorted(others, key=lambda name: _draw(commit, name))[part - 1 :: parts])
            reasons.append(f"{len(rest)} of {len(others)} others, drawn by the commit")
        elif word in mutants:
            named.add(word)
        else:
            raise ValueError(f"no planted bug is called {word!r}; there are {', '.join(mutants)}")
    if named:
        reasons.insert(0, f"{len(named)} by name")
    names = tuple(name for name in mutants if name in named | touched | rest)
    return Choice(names, f"planted {len(names)} of {len(mutants)}: {', '.join(reasons)}")


def changed_files(base: str, root: Path) -> set[str] | None:
    """Return the files that differ from a commit, new files included; None if the history does not have it."""
    commit = _git(root, "rev-parse", "--verify", "--quiet", f"{base}^{{commit}}").strip()
    if not commit:
        return None
    listed = _git(root, "diff", "--name-only", commit) + _git(root, "ls-files", "--others", "--exclude-standard")
    return set(listed.splitlines())


def files_that_concern(each: Mutant) -> set[str]:
    """Return the files, relative to the checkout, with the function that a bug replaces, the bug itself and the tests that it names."""
    modules = [each.target.partition(":")[0], each.mutate.__module__]
    paths = [path for module in modules for path in _paths_of(module)]
    return {*paths, *(Path(file).relative_to(ROOT).as_posix() for file in files_of([each]))}


def _paths_of(module: str) -> Iterable[str]:
    path = module.replace(".", "/")
    return f"{path}.py", f"{path}/__init__.py"


def _draw(commit: str, name: str) -> int:
    return int(hashlib.sha256(f"{commit} {name}".encode()).hexdigest(), 16)


def _git(root: Path, *arguments: str) -> str:
    """Return what git prints; nothing where it fails or is missing."""
    try:
        return subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True, check=False).stdout
    except OSError:
        return ""
