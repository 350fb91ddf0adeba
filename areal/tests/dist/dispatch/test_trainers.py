"""Trainers run unchanged on a group: the same curves as on the engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from areal.dispatch import WorkerGroup
from areal.tests.dist.dispatch.trainer_runs import RUNS, SAVED, TIMES, Make, Steps, alone, engines, ppo, rest_of_ppo
from areal.tests.grid.models import model_dir
from areal.tests.harness.rl import Curve


def curves(run: Callable[[Make, str], Steps]) -> tuple[Steps, Steps]:
    """Return the curves of engines and of groups, in this process."""
    found = []
    for name, create in (("engine", alone), ("group", lambda settings, name: WorkerGroup(settings, name=name))):
        with engines(create, "fsdp:d1", model_dir("qwen3")) as make:
            found.append(run(make, name))
    return found[0], found[1]


def assert_same(engine: Steps, group: Steps) -> None:
    assert group
    for expected, actual in zip(engine, group, strict=True):
        assert expected.keys() == actual.keys()
        # Rollouts round by which requests they compute together.
        measured = {name: value for name, value in expected.items() if not TIMES.search(name)}
        assert {name: actual[name] for name in measured} == pytest.approx(measured, rel=1e-5, abs=1e-6)


@pytest.mark.world(1)
@pytest.mark.parametrize("run", list(RUNS.values()))
def test_trainer_on_a_group_has_the_curve_of_the_engine(run: Callable[[Make], Curve]) -> None:
    assert_same(*curves(lambda make, _: run(make).steps))


@pytest.mark.world(1)
def test_run_resumes_on_an_engine_and_on_a_group(tmp_path: Path) -> None:
    engine, group = curves(lambda make, name: ppo(make, tmp_path / name).steps)
    for saver in ("engine", "group"):

        def rest(make: Make, name: str, saver: str = saver) -> Steps:
            return rest_of_ppo(make, tmp_path / saver, tmp_path / f"{saver} to {name}").steps

        on_the_engine, on_the_group = curves(rest)
        assert_same(engine[SAVED:], on_the_group)
        assert_same(group[SAVED:], on_the_engine)
