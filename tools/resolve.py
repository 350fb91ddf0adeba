"""Resolve this package together with other frameworks, and print which releases an installer would choose.

    make test-resolve

asks the package index, installs nothing, and fails if a combination has no solution.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SHOWN = ("torch", "transformers", "peft")


@dataclass(frozen=True)
class Combination:
    """Packages that one environment must hold beside this one."""

    python: str
    requirements: tuple[str, ...]

    @property
    def name(self) -> str:
        return ", ".join(self.requirements) or "newest of all"


COMBINATIONS = (
    Combination("3.12", ("verl==0.9.1",)),
    Combination("3.12", ("verl[fsdp]==0.9.1",)),
    Combination("3.12", ("skyrl==0.3.0",)),
    Combination("3.12", ("skyrl==0.3.0", "torch==2.11.0")),  # its extra asks another index for kernels
    Combination("3.11", ("trl==1.16.0",)),
    Combination("3.11", ("verifiers==0.4.0",)),
    Combination("3.11", ("transformers==5.6.2", "torch==2.11.*")),
    Combination("3.11", ()),
    Combination("3.13", ()),
)


def resolve(uv: str, combination: Combination, extras: list[str]) -> tuple[dict[str, str], str]:
    """Return the versions that uv chooses by package, or none and the reason why there is no solution."""
    package = f"areal[{','.join(extras)}] @ {ROOT.as_uri()}"
    command = [uv, "pip", "compile", "--quiet", "--no-annotate", "--python-version", combination.python, "-"]
    text = "\n".join((package, *combination.requirements))
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        return {}, " ".join(done.stderr.split())
    return dict(re.findall(r"^([\w.-]+)==(\S+)", done.stdout, re.MULTILINE)), ""


def all_extras() -> list[str]:
    """Return the extras for users, without those of a contributor, which repeat them, and without other frameworks.

    The metadata of flash-attn need a compiler.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [
        name
        for name in project["optional-dependencies"]
        if name not in ("gpu", "docs", "dev", "test", "verl", "skyrl", "trl", "verifiers")
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--uv", default="uv", help="the program uv")
    options = parser.parse_args()
    failed = 0
    print(f"| Python | together with | extras | {' | '.join(SHOWN)} |")
    print(f"|{'---|' * (3 + len(SHOWN))}")
    for combination in COMBINATIONS:
        for extras in ([], all_extras()):
            versions, reason = resolve(options.uv, combination, extras)
            failed += not versions
            cells = [versions.get(name, "-") for name in SHOWN] if versions else [f"no: {reason}"]
            print(
                f"| {combination.python} | {combination.name} | {'all' if extras else 'none'} | {' | '.join(cells)} |"
            )
            sys.stdout.flush()
    print(f"\n{failed} of {2 * len(COMBINATIONS)} have no solution")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
