"""Print the requirements of extras, one per line, without those that need a C compiler: ``without_compiler.py '.[demo,test]'``."""

import re
import sys
import tomllib
from pathlib import Path

COMPILED = ("reasoning-gym",)

extras = tomllib.loads(Path("pyproject.toml").read_text())["project"]["optional-dependencies"]


def requirements(names: str) -> list[str]:
    """Return the requirements of extras, and of the extras that these name."""
    found = []
    for extra in names.split(","):
        for line in extras[extra.strip()]:
            own = re.fullmatch(r"areal\[(.*)\]", line)
            found += requirements(own[1]) if own else [line]
    return [line for line in found if not line.startswith(COMPILED)]


print("\n".join(dict.fromkeys(requirements(sys.argv[1].partition("[")[2].rstrip("]")))))
