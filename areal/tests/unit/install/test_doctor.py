"""``areal doctor``: a real run, and each kind of fault in its own words."""

from __future__ import annotations

import math
import re
import time
import tomllib
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import areal.entry_points
from areal.cli.doctor import command, packages
from areal.cli.doctor.command import check_engines, check_names, compare_ranks
from areal.cli.doctor.findings import Finding, State
from areal.cli.doctor.packages import NEWEST_TESTED, check_extras, check_packages, check_python
from areal.cli.doctor.rank_process import try_engine
from areal.cli.doctor.ranks import Observed, observe
from areal.tests.unit.install.environments import (
    ROOT,
    copy_package,
    install_other,
    link_dependencies,
    make_environment,
    run_isolated,
)

ABSENT = ("jax", "megatron", "tyro")
"""Beginnings of the names of packages that the environment of the real run does not have."""

STAND_IN = """
import json, os, sys, time

rank, folder = int(sys.argv[1]), sys.argv[2]
if rank == 0:
    with open(folder + "/results.jsonl", "w") as file:
        for result in ({"devices": ["CPU"]}, {"one": [2.0, 1.0]}, {"engine": "fsdp", "letters": "d"}, {"stage": "STAGE"}):
            print(json.dumps(result), file=file)
"""
"""Process of a rank that reports as the real one does. Tests add how it ends."""


def run_cli(folder: Path, *options: str) -> tuple[int, str, str]:
    """Run the command line of a copy on ``PYTHONPATH``, in an environment without the packages in ``ABSENT``."""
    if not (folder / "copy").exists():
        make_environment(folder / "environment")
        copy_package(folder / "copy")
        link_dependencies(folder / "dependencies", ABSENT)
    path = f"{folder / 'copy'}:{folder / 'dependencies'}"
    command = [folder / "environment" / "bin" / "python", "-m", "areal.cli", *options]
    done = run_isolated(command, folder, timeout=280, PYTHONPATH=path)
    return done.returncode, done.stdout, done.stderr


def line(text: str, name: str) -> str:
    """Return the line of the report about ``name``."""
    return next(line for line in text.splitlines() if line.split()[1:2] == [name])


def test_copy_without_metadata_and_extras(tmp_path: Path) -> None:
    """The engines of a copy are found without metadata, and train the same on one rank and on two."""
    code, help_text, error = run_cli(tmp_path, "--help")
    assert (code, error) == (0, "")
    assert "doctor" in help_text
    assert "serve" in help_text
    assert run_cli(tmp_path, "serve", "--help") == (
        1,
        "",
        "areal serve: tyro is not installed: pip install 'areal[tinker]'\n",
    )
    code, report, error = run_cli(tmp_path, "doctor", "--timeout", "240")
    assert (code, error) == (0, ""), report + error
    assert report.endswith("\nfine\n")
    assert line(report, "fsdp").split()[0] == "ok"
    for name in ("jax", "megatron"):
        assert f"install the extra {name} of pyproject.toml  ({name}" in line(report, name)
    assert "no metadata" in line(report, "areal")
    assert str(tmp_path / "copy" / "areal") in line(report, "areal")
    differ = line(report, "two")
    assert differ.split()[0] == "ok"
    assert 0 <= float(differ.split("differ by ")[1].split(",")[0]) < 1e-5


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a module ``stand_in``, which the processes can import."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path / "stand_in.py"


@pytest.mark.parametrize(
    ("ending", "stage", "message"),
    [
        ("time.sleep(600)", "connecting", r"no result after 1.5 s, while connecting.*127.0.0.1.*GLOO_SOCKET_IFNAME"),
        (
            "time.sleep(600 * (1 - rank)); sys.exit('no address for this host')",
            "connecting",
            r"rank 1 ended with exit code 1 while connecting\nno address for this host\n.*GLOO_SOCKET_IFNAME",
        ),
        (
            "time.sleep(600 * rank); os.abort()",
            "importing the engine 'other'",
            r"rank 0 ended with signal 6 while importing the engine 'other'\nthe engine of that name ends the process",
        ),
    ],
    ids=["hangs", "second rank fails", "engine crashes"],
)
def test_check_ends_and_says_why(ending: str, stage: str, message: str, stand_in: Path) -> None:
    stand_in.write_text(STAND_IN.replace("STAGE", stage) + ending)
    started = time.monotonic()
    observed = observe(1.5, "stand_in")
    assert time.monotonic() - started < 30  # not the 600 s for which the processes wait
    finding = compare_ranks(observed)
    assert finding.state is State.FAULT
    assert re.search(message, finding.text, re.DOTALL), finding.text
    # Earlier results are reported.
    assert (observed.devices, list(observed.engines)) == (["CPU"], ["fsdp"])


def test_one_process_that_cannot_train_points_to_packages(stand_in: Path) -> None:
    stand_in.write_text("import no_such_module")
    finding = compare_ranks(observe(20.0, "stand_in"))
    assert finding.state is State.FAULT
    assert "No module named 'no_such_module'" in finding.text
    assert "while importing torch" in finding.text
    assert "see packages" in finding.text


def test_different_numbers_are_a_fault() -> None:
    def state(two: list[float], one: Sequence[float] = (2.0, 1.0)) -> State:
        return compare_ranks(Observed(one=[*one], two=two)).state

    assert state([2.0, 1.00001]) is State.FINE
    assert state([2.0, 1.001]) is State.FAULT
    assert state([2.0, 0.999]) is State.FAULT
    # Also those that are not finite, wherever they are.
    for wrong in (math.nan, math.inf):
        assert state([2.0, wrong]) is State.FAULT
        assert state([wrong, 1.0]) is State.FAULT
        assert state([2.0, wrong], one=[2.0, wrong]) is State.FAULT


def test_broken_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An engine whose import fails is a fault, unless it belongs to an extra that is not installed."""
    (tmp_path / "broken_engine.py").write_text("raise RuntimeError('compiled for another torch')")
    (tmp_path / "needy_engine.py").write_text("import no_such_module")
    monkeypatch.syspath_prepend(str(tmp_path))
    points = [EntryPoint(name, f"{name}_engine:Engine", "areal.engines") for name in ("broken", "needy")]
    for point in points:
        vars(point).update(dist=None)
    monkeypatch.setattr(areal.entry_points, "entry_points", lambda group: points)
    observed = Observed(engines={name: try_engine(name) for name in ("broken", "needy", "fsdp")})
    # The same failure of an engine of this package, whose extra is installed or not.
    observed.engines["jax"] = observed.engines["megatron"] = {"error": "ImportError: no symbol", "missing": None}
    findings = {finding.name: finding for finding in check_engines(observed, {"megatron"}, installed=True)}
    assert {name: finding.state for name, finding in findings.items()} == {
        "broken": State.FAULT,
        "needy": State.FAULT,
        "fsdp": State.FINE,
        "jax": State.FAULT,
        "megatron": State.ABSENT,
    }
    assert "RuntimeError: compiled for another torch" in findings["broken"].text
    assert "no_such_module" in findings["needy"].text
    assert "reinstall or uninstall the packages of the extra jax" in findings["jax"].text
    assert "reinstall or uninstall the package that declares it" in findings["broken"].text
    assert "pip install 'areal[megatron]'" in findings["megatron"].text


def test_exit_code_counts_faults(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fine = Observed(devices=["CPU"], engines={"fsdp": {"letters": "d"}}, one=[1.0], two=[1.0])
    monkeypatch.setattr(command, "observe", lambda timeout: fine)
    assert command.run_doctor([]) == 0
    assert capsys.readouterr().out.endswith("\nfine\n")
    monkeypatch.setattr(command, "observe", lambda timeout: Observed(failure="no result", engines=fine.engines))
    assert command.run_doctor(["--timeout", "5"]) == 1
    assert capsys.readouterr().out.endswith("1 fault: see the lines with FAULT\n")
    with pytest.raises(SystemExit):
        command.run_doctor(["--timeout", "0"])
    assert "--timeout: 0: must be above 0" in capsys.readouterr().err


REQUIREMENTS = [
    Requirement(line)
    for line in (
        "torch<2.16,>=2.11",
        "transformers>=5.6",
        "pydantic>=2.7",
        'jax>=0.10; extra == "jax"',
        'peft>=0.18; extra == "lora"',
        'psycopg[binary]>=3.2; extra == "postgres"',
        'uvloop>=0.21; sys_platform == "no_such_system" and extra == "tinker"',
        'pytest>=9; extra == "test"',
    )
]


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    monkeypatch.setattr(packages, "installed_version", versions.get)


def test_versions_are_compared_with_requirements(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, torch="2.10.2+cpu", transformers="5.24.1", jax="0.9", peft="0.18.1", pytest="1.0")
    findings = {finding.name: finding for finding in check_packages(REQUIREMENTS)}
    assert {name: finding.state for name, finding in findings.items()} == {
        "torch": State.FAULT,
        "transformers": State.NOTE,  # allowed, and newer than the tests have seen
        "pydantic": State.FAULT,
        "jax": State.NOTE,  # of an extra: other programs may want it
        "peft": State.FINE,
    }
    assert "2.10.2+cpu: requires <2.16,>=2.11: pip install 'areal'" in findings["torch"].text
    assert "newer than the tests have seen" in findings["transformers"].text
    assert "not installed" in findings["pydantic"].text
    assert "pip install 'areal[jax]'" in findings["jax"].text


def test_versions_without_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, torch="2.15.3", ray="3.0")
    assert [(name, state) for name, state, _ in check_packages(None)] == [("torch", State.FINE), ("ray", State.NOTE)]


def test_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, jax="0.10.1", peft="0.17", pytest="9.2")
    assert check_extras(REQUIREMENTS) == [
        Finding("jax", State.FINE, "installed"),
        Finding("lora", State.ABSENT, "pip install 'areal[lora]'  (missing: peft>=0.18)"),
        Finding("postgres", State.ABSENT, "pip install 'areal[postgres]'  (missing: psycopg>=3.2)"),
        Finding("tinker", State.FINE, "installed"),  # needs nothing on this system
    ]


@pytest.mark.parametrize(
    ("version", "state"),
    [("3.10.14", State.FAULT), ("3.11.0", State.FINE), ("3.13.9", State.FINE), ("3.14.0", State.NOTE)],
)
def test_python(version: str, state: State) -> None:
    finding = check_python(version)
    assert finding.state is state
    assert version in finding.text


def test_newest_tested_releases_are_allowed() -> None:
    """A release that the tests have run with must satisfy the requirements in pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    by_name = {requirement.name: requirement for requirement in map(Requirement, lines)}
    assert all(by_name[name].specifier.contains(newest) for name, newest in NEWEST_TESTED.items() if name != "python")
    assert Requirement(f"python{project['requires-python']}").specifier.contains(packages.OLDEST_PYTHON)


def test_other_project_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_names() == []
    install_other(tmp_path, over=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    (finding,) = check_names()
    assert finding.state is State.FAULT
    assert str(tmp_path / "areal-1.0.4.dist-info") in finding.text
    assert "pip uninstall areal" in finding.text
