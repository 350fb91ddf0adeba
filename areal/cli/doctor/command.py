"""``areal doctor``: print the report, and return 1 if something must be repaired."""

from __future__ import annotations

import argparse
import math
import shutil
import sys
from pathlib import Path

from areal.cli.doctor.findings import Finding, State, print_section
from areal.cli.doctor.packages import check_extras, check_packages, check_python, own_distribution, own_requirements
from areal.cli.doctor.ranks import Observed, observe
from areal.entry_points import BUILT_IN, ENGINE_GROUP
from areal.name_clash import WAY_OUT, other_metadata

TOLERANCE = 1e-4
"""Largest relative difference between one rank and two: float32 on a CPU gives about 1e-6, kernels of GPUs less exact sums."""


def run_doctor(options: list[str]) -> int:
    """Run ``areal doctor``. Returns 0 if all is well, else 1."""
    parser = argparse.ArgumentParser(
        prog="areal doctor", description="Check this environment, and train one step on two local ranks against one."
    )
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds until the two ranks are stopped (120)")
    timeout = parser.parse_args(options).timeout
    if timeout <= 0:
        parser.error(f"argument --timeout: {timeout:g}: must be above 0")
    distribution = own_distribution()
    requirements = own_requirements(distribution) if distribution is not None else None
    sections = [("packages", [check_python(), *check_packages(requirements)])]
    sections.append(("extras", check_extras(requirements) if requirements is not None else [_no_metadata()]))
    sections.append(
        ("system", [_own_files(distribution.version if distribution else "no metadata"), *check_names(), _compiler()])
    )
    for title, findings in sections:
        print_section(title, findings)
    observed = observe(timeout)
    missing = {finding.name for finding in sections[1][1] if finding.state is State.ABSENT}
    further = [
        ("devices", [Finding(f"{i}", State.FINE, line) for i, line in enumerate(observed.devices)]),
        ("engines", check_engines(observed, missing, installed=distribution is not None)),
        ("training", [compare_ranks(observed)]),
    ]
    for title, findings in further:
        print_section(title, findings)
    faults = sum(finding.state is State.FAULT for _, findings in (*sections, *further) for finding in findings)
    print("fine" if faults == 0 else f"{faults} {'fault' if faults == 1 else 'faults'}: see the lines with FAULT")
    return min(faults, 1)


def check_names() -> list[Finding]:
    """Return a fault for each installation of the other project that is called areal."""
    return [
        Finding("AReaL", State.FAULT, f"another project with the import name areal: {path}. {WAY_OUT}.")
        for path in other_metadata(sys.path)
    ]


def check_engines(observed: Observed, missing_extras: set[str], *, installed: bool) -> list[Finding]:
    """Return whether each engine can be imported, and if not, what to install.

    Args:
        observed: reports of both ranks.
        missing_extras: extras that are not installed.
        installed: areal has metadata. Without it, pip would fetch the other project that is called areal.
    """
    findings = []
    for name, result in observed.engines.items():
        built_in = name in BUILT_IN[ENGINE_GROUP]
        if "error" not in result:
            findings.append(Finding(name, State.FINE, f"layouts of {' '.join(result['letters']) or 'its own'}"))
        elif built_in and (name in missing_extras or result["missing"] is not None) and name != "fsdp":
            install = f"pip install 'areal[{name}]'" if installed else f"install the extra {name} of pyproject.toml"
            findings.append(Finding(name, State.ABSENT, f"{install}  ({result['missing']} is missing)"))
        else:
            packages = f"the packages of the extra {name}" if built_in else "the package that declares it"
            findings.append(Finding(name, State.FAULT, f"{result['error']}\nreinstall or uninstall {packages}"))
    return findings or [Finding("engines", State.FAULT, "not reached, see training")]


def compare_ranks(observed: Observed) -> Finding:
    """Compare the numbers of two ranks with those of one."""
    name = "two ranks"
    if observed.failure or not observed.one or not observed.two:
        text = f"{observed.failure}\n{observed.output}".rstrip()
        return Finding(name, State.FAULT, f"{text}\n{_way_out(observed)}")
    pairs = zip(observed.one, observed.two, strict=True)
    differences = [abs(two - one) / max(abs(one), 1e-12) for one, two in pairs]
    # max() alone would pass over most of those that are no number.
    difference = next(filter(math.isnan, differences), max(differences))
    steps = f"losses and gradient norms of {len(observed.one) // 2} steps on fsdp:d2 and fsdp:d1"
    text = f"{steps} differ by {difference:.1e}, {observed.seconds:.0f} s"
    if difference <= TOLERANCE:
        return Finding(name, State.FINE, text)
    return Finding(
        name, State.FAULT, f"{text}: not within {TOLERANCE:g}\n{observed.one} and {observed.two}: report this"
    )


def _way_out(observed: Observed) -> str:
    if observed.one is None:
        return "one process cannot train: see packages, and install what the last line names"
    if "importing" in observed.stage:
        return "the engine of that name ends the process: uninstall or reinstall its packages"
    return (
        "one process trains, two cannot talk: allow connections to 127.0.0.1, and name the interface if the host name does not "
        "resolve: GLOO_SOCKET_IFNAME=lo areal doctor. A busy machine needs more time: areal doctor --timeout 300"
    )


def _own_files(version: str) -> Finding:
    return Finding("areal", State.FINE, f"{version}, {Path(__file__).parents[2]}")


def _compiler() -> Finding:
    found = next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None)
    if found:
        return Finding("C++", State.FINE, found)
    return Finding("C++", State.NOTE, "no g++ or clang++: only fsdp.compile on a CPU needs one (apt install g++)")


def _no_metadata() -> Finding:
    return Finding("extras", State.NOTE, "unknown: this copy of areal was not installed by pip and has no metadata")
