"""Trainers in the driver, engines in two processes: the curves of torchrun, of the golden files, and runs that change the launcher."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from areal.api import ParallelDims, TensorSource, TrainEngine, TrainEngineConfig
from areal.dispatch import WorkerGroup
from areal.dispatch.ray import RayWorkers
from areal.inference.http import VLLM, Dialect, HTTPRollout, SGLang
from areal.recipes import GRPOConfig, GRPORun
from areal.tests.dist.dispatch.overlap import check_overlap
from areal.tests.dist.dispatch.trainer_runs import RUNS, SAVED, TIMES, Make, Steps, alone, engines, ppo, rest_of_ppo
from areal.tests.dist.recipes.policy_runs import REWARDS, SMALL, curve, curve_of_one_process, evaluated_run
from areal.tests.dist.trainer.ppo_runs import GOLDEN, PLAN, STEPS, run
from areal.tests.grid.models import model_dir
from areal.tests.harness.recipes.recipe_data import recipe_model, reward, rows
from areal.tests.harness.rl import EPISODE, Curve, Prompts
from areal.tests.harness.servers.rollout_http import Process
from areal.trainer.grpo import grpo_trainer
from areal.trainer.ppo import Sync
from areal.trainer.rollout.plan import Plan
from areal.trainer.rollout.runner import Runner
from areal.trainer.trackers import JSONLTracker
from areal.trainer.updates import Updates
from areal.weight_sync.disk import DiskTransport

pytestmark = [pytest.mark.timeout(580)]

BACKENDS = ("fsdp:d2", "megatron:t2")
SCRIPT = "areal.tests.dist.dispatch.trainer_runs"


def groups(backend: str, *workers: RayWorkers) -> AbstractContextManager[Make]:
    """Return a function that starts groups on the processes that their layout has the size of."""
    by_size = {each.size: each for each in workers}

    def create(settings: TrainEngineConfig, name: str) -> TrainEngine:
        return WorkerGroup(settings, by_size[ParallelDims.parse(settings.backend).world_size], name=name)

    return engines(create, backend, model_dir("qwen3"))


def error_of(actual: Steps, expected: Steps) -> float:
    """Return the largest error of all numbers that depend neither on the clock nor on the division of a batch."""
    assert [step.keys() for step in actual] == [step.keys() for step in expected]
    return max(
        abs(step[name] - value) / max(abs(value), 0.05)
        for step, other in zip(actual, expected, strict=True)
        for name, value in other.items()
        if not (TIMES.search(name) or name.endswith("/n_mbs"))
    )


def tolerance(name: str, backend: str) -> float:
    """Return the tolerance of a run on the same layout with another launcher.

    With one data-parallel coordinate, every rank computes the same with both: the curves have the same bits, unless a rollout rounds by
    which requests it computes together. With several, the driver divides a batch by cost, and torchrun in slices, so that sums are rounded
    in another order.
    """
    if ParallelDims.parse(backend).dp > 1:
        return 1e-4
    return 0.0 if name in ("sft", "dpo") else 2e-5


@dataclass(frozen=True)
class Curves:
    """Curves of torchrun, and of the runs that a group left for it to resume, by layout and name.

    Attributes:
        folder: with the checkpoints of torchrun.
    """

    folder: Path
    torchrun: dict[str, dict[str, Steps]]
    group: dict[str, Steps]


@pytest.fixture(scope="module")
def curves(pair: RayWorkers, tmp_path_factory: pytest.TempPathFactory) -> Curves:
    """Run PPO on groups with checkpoints, and then everything under torchrun, where it resumes them."""
    folder, group = tmp_path_factory.mktemp("runs"), dict[str, Steps]()
    for backend in BACKENDS:
        with groups(backend, pair) as make:
            group[backend] = ppo(make, folder / "group" / backend).steps
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", SCRIPT]
    ended = subprocess.run(
        [*command, model_dir("qwen3"), str(folder), *BACKENDS],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 0, ended.stdout
    return Curves(folder / "torchrun", json.loads((folder / "curves.json").read_text()), group)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", RUNS)
def test_trainer_has_the_curve_of_torchrun(pair: RayWorkers, curves: Curves, name: str, backend: str) -> None:
    """On the same layout, step by step, in every number."""
    if name == "ppo":
        steps = curves.group[backend]
    else:
        with groups(backend, pair) as make:
            steps = RUNS[name](make).steps
    error = error_of(steps, curves.torchrun[backend][name])
    assert error <= tolerance(name, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_run_resumes_with_the_other_launcher(pair: RayWorkers, curves: Curves, backend: str, tmp_path: Path) -> None:
    whole = curves.torchrun[backend]["ppo"]
    with groups(backend, pair) as make:
        on_the_group = rest_of_ppo(make, curves.folder / backend, tmp_path / "rest").steps
    for rest in (on_the_group, curves.torchrun[backend]["rest"]):
        error = error_of(rest, whole[SAVED:])
        assert error < tolerance("ppo", backend)


def test_critic_on_another_number_of_ranks_than_the_policy(pair: RayWorkers) -> None:
    """The driver sees one data-parallel shard of each."""
    with engines(alone, "fsdp:d1", model_dir("qwen3")) as make:
        expected = ppo(make).steps
    with (
        RayWorkers(1, resources={"CPU": 0.5}, environment={"OMP_NUM_THREADS": "1"}) as one,
        groups("fsdp:d2", pair, one) as make,
    ):
        layouts = {"policy": "fsdp:d2", "critic": "fsdp:d1"}
        steps = ppo(lambda name, **changes: make(name, backend=layouts[name], **changes)).steps
    error = error_of(steps, expected)
    assert error < tolerance("ppo", "fsdp:d2")


def test_grpo_has_the_golden_curve(pair: RayWorkers) -> None:
    golden: dict[str, list[float]] = json.loads(GOLDEN.read_text())
    with groups("fsdp:d2", pair) as make:
        reference = make("reference", optimizer=None)
        curve, _ = run(make("policy"), PLAN, STEPS, reference=reference, updates=Updates(minibatches=2))
    errors = {
        name: max(abs(a - b) / max(abs(b), 0.05) for a, b in zip(curve[name], expected, strict=True))
        for name, expected in golden.items()
    }
    assert max(errors.values()) < 2e-3, errors


def test_models_in_processes_of_their_own_score_and_train_together(cluster: Any, tmp_path: Path) -> None:
    with ExitStack() as stack:
        executors = {
            name: stack.enter_context(RayWorkers(1, resources={"chip": 0.5}, environment={"OMP_NUM_THREADS": "1"}))
            for name in ("policy", "reference", "critic")
        }
        check_overlap(executors, tmp_path, seconds=60.0)


# ---- servers of the driver


@pytest.fixture
def servers() -> Iterator[list[Process]]:
    processes = [Process(), Process()]
    yield processes
    for process in processes:
        process.kill()


LOADS: dict[type[Dialect], tuple[str, str]] = {
    VLLM: ("/pause", "/collective_rpc"),
    SGLang: ("/pause_generation", "/update_weights_from_disk"),
}
"""Routes of a pause and of a load."""


def through_the_driver(group: WorkerGroup, rollout: HTTPRollout, folder: Path) -> Sync:
    """Return a function that writes the weights in the driver, which gets them as a stream."""
    return rollout.sync


def from_the_ranks(group: WorkerGroup, rollout: HTTPRollout, folder: Path) -> Sync:
    """Return a function that lets rank 0 write the weights, so that they do not travel through the driver."""
    model = group.config.path
    transport = group.transport(lambda engine: DiskTransport(engine.control, folder, model=model))

    def sync(source: TensorSource, version: int) -> None:
        transport.send(source, version)
        rollout.load(folder / f"version-{version:08d}", version)

    return sync


@pytest.mark.parametrize(("backend", "dialect"), [("fsdp:d2", SGLang), ("megatron:t2", VLLM)])
def test_driver_owns_the_servers(
    pair: RayWorkers, servers: list[Process], backend: str, dialect: type[Dialect], tmp_path: Path
) -> None:
    """Two ranks train; the driver generates. For each update, a server gets one pause and one load, and there is one set of files."""
    curves, updates = [], 3 + 1  # the first is that of the start
    for send in (through_the_driver, from_the_ranks):
        folder, curve = tmp_path / send.__name__, Curve()
        with (
            groups(backend, pair) as make,
            HTTPRollout(
                [server.url for server in servers], dialect(), folder=folder, model=model_dir("qwen3"), deadline=60
            ) as rollout,
            contextlib.closing(Runner(rollout, EPISODE, Prompts(), Plan(groups=4, group_size=3, seed=11))) as runner,
        ):
            group = make("policy")
            assert isinstance(group, WorkerGroup)
            for server in servers:
                server.tell(reset=True)
            grpo_trainer(group, runner, send(group, rollout, folder), tracker=curve).train(3)
        calls = [[server.calls(route) for route in LOADS[dialect]] for server in servers]
        assert calls == [[updates, updates]] * 2
        # The batch after the last one has begun.
        generated = [len(server.told()["seen"]) for server in servers]
        assert all(generated)
        assert 3 * 4 * 3 <= sum(generated) <= 4 * 4 * 3
        assert sorted(path.name for path in folder.iterdir()) == ["version-00000002", "version-00000003"]
        assert max(curve["rollout/logprob_error"]) < 1e-5
        assert (curve["rollout/sequences"], curve["rollout/staleness"]) == ([12.0] * 3, [0.0] * 3)
        curves.append(curve.steps)
    assert error_of(curves[1], curves[0]) == 0.0


ON_RAY: dict[str, Any] = {"workers": "ray", "ray": {"environment": {"OMP_NUM_THREADS": "1"}}}


def test_recipe_goes_on_after_the_loss_of_an_actor(cluster: Any, tmp_path: Path) -> None:
    """An actor is killed after the second step, before its checkpoint: the step is taken again, with the same answers.

    The checkpoint of the first step was saved before its evaluation, which is made again.
    """
    killed: list[int] = []

    class Killer(JSONLTracker):
        def log(self, step: int, scalars: Any) -> None:
            super().log(step, scalars)
            if step == 2 and not killed:
                killed.append(run.engine.run(lambda engine, _: os.getpid())[1])
                os.kill(killed[0], signal.SIGKILL)

    settings = {**ON_RAY, "checkpoint_every": 1, "max_losses": 1, "kl_coef": 0.01, "eval_every": 1}
    run: Any = GRPORun(
        GRPOConfig(model=recipe_model(), backend="fsdp:d2", output=tmp_path, **SMALL, **settings),
        rows(24),
        reward,
        evaluation=rows(2, 1),
        tracker=Killer(tmp_path / "metrics.jsonl"),
    )
    run.train()
    assert killed
    assert sorted(run.results.by_step) == [0, 1, 2, 3]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "actor/grad_norm" in line]
    assert [line["step"] for line in lines] == [1, 2, 2, 3]
    for name in ("rollout/reward", "actor/grad_norm", "actor/kl_ref/k3"):
        assert lines[1][name] == lines[2][name]


def test_recipe_has_the_rewards_of_one_process(cluster: Any, tmp_path: Path) -> None:
    expected = curve_of_one_process()
    evaluated_run("fsdp:d2", recipe_model(), tmp_path, **ON_RAY).train()
    got = curve(tmp_path, REWARDS)
    assert {name: len(its) for name, its in got.items()} == {"rollout/reward": 3, "eval/reward": 3}
    for name in REWARDS:
        assert got[name] == pytest.approx(expected[name], abs=1e-6)
