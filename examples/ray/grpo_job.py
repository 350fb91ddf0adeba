"""GRPO in a Ray job: the trainer and the rollout run in the driver, and the ranks of the engine in Ray actors.

    ray job submit --working-dir examples -- python ray/grpo_job.py --backend fsdp:d2 --model DIRECTORY --output DIRECTORY

README.md describes the cluster, the environment and the directories. The run writes the files of grpo.py to the output
directory, and checkpoints, from which it goes on after the loss of a process or a node.
"""

from __future__ import annotations

import itertools
import logging
import sys
from dataclasses import dataclass, field
from typing import Literal

import tyro
from grpo import Run, main
from rl_settings import RLConfig

from areal import TrainEngineConfig
from areal.dispatch import WorkerGroup
from areal.dispatch.errors import WorkerLostError
from areal.dispatch.ray import RayWorkers
from areal.trainer.checkpoints import Checkpoints
from areal.trainer.ppo import PPOTrainer


@dataclass(frozen=True)
class JobConfig(RLConfig):
    """One run of reinforcement learning in a Ray job. Directories must be the same on all nodes."""

    resources: dict[str, float] = field(default_factory=lambda: {"CPU": 1.0})
    """Resources of one process, as name and quantity, such as GPU 1."""
    processes_per_bundle: int = 1
    """Processes that are on one node together."""
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    """Strategy of the placement group."""
    start_seconds: float = 300.0
    """Seconds to wait for the resources, also after the loss of a node."""
    checkpoint_every: int = 1
    """Steps between checkpoints; the newest is kept."""
    max_losses: int = 3
    """Losses of a process or a node after which the job fails."""


class JobRun(Run):
    """A run whose engines are groups of the same processes.

    Args:
        config: settings of the run.
        workers: processes of all ranks.
    """

    config: JobConfig

    def __init__(self, config: JobConfig, workers: RayWorkers) -> None:
        super().__init__(config)
        self.workers = workers
        self.groups: list[WorkerGroup] = []

    def new_engine(self, settings: TrainEngineConfig) -> WorkerGroup:
        name = f"engine-{len(self.groups)}"
        self.groups.append(WorkerGroup(settings, self.workers, name=name, shared_folder=self.config.output))
        return self.groups[-1]

    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self.config.output / "checkpoints", every=self.config.checkpoint_every)

    def take_steps(self, trainer: PPOTrainer) -> None:
        """Train, and go on from the newest checkpoint after the loss of a process."""
        # The output directory has a checkpoint if a job that was submitted before has ended early.
        trainer.resume()
        for losses in itertools.count(1):
            try:
                return super().take_steps(trainer)
            except WorkerLostError as error:
                self.report.line(f"lost: {error}")
                if losses > self.config.max_losses:
                    raise
            self.restart(trainer)

    def restart(self, trainer: PPOTrainer) -> None:
        """Start new processes, with the engines of the trainer, and load the newest checkpoint."""
        for group in self.groups:
            if group in (trainer.engine, trainer.reference):
                group.restart()
        self.report.line(f"restarted on {nodes(self.workers)}: going on after step {trainer.resume()}")


def nodes(workers: RayWorkers) -> str:
    """Return the number of processes of each node."""
    names = [process_info.node_name for process_info in workers.process_infos]
    return ", ".join(f"{name}: {names.count(name)} processes" for name in dict.fromkeys(names))


def run(config: JobConfig) -> int:
    """Start the processes, and run. Returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    with RayWorkers(
        config.engine(path=config.model).dims.world_size,
        resources=config.resources,
        processes_per_bundle=config.processes_per_bundle,
        strategy=config.strategy,
        start_seconds=config.start_seconds,
    ) as workers:
        return main(config, lambda its: JobRun(its, workers))


if __name__ == "__main__":
    sys.exit(run(tyro.cli(JobConfig, description=__doc__)))
