"""The command ``python -m areal.tests.lint``: prints ``file:line: message`` for each offence, and exits with 1 if there is one."""

from __future__ import annotations

import importlib
import pkgutil
import sys

import areal.tests.lint
from areal.tests.lint.sources import ROOT, sources


def main() -> int:
    """Run the checks of every module of this package that has ``offences()``."""
    names = [module.name for module in pkgutil.iter_modules(areal.tests.lint.__path__) if module.name != "__main__"]
    modules = [importlib.import_module(f"areal.tests.lint.{name}") for name in names]
    checking = [module for module in modules if hasattr(module, "offences")]
    found = sorted(offence for module in checking for offence in module.offences())
    print(*found, sep="\n", end="\n" if found else "")
    # A module that does not list its checks is one.
    count = sum(len(getattr(module, "CHECKS", (module,))) for module in checking)
    files = len(sources(ROOT).python)
    print(f"{len(found)} offences, {count} checks, {files} Python files")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
