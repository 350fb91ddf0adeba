"""GRPO on two nodes of a cluster on this machine. One node is lost in the middle of a step, and the run goes on with another.

    python -m areal.tests.dispatch_ray.nodes.two_nodes FOLDER

Prints a line of JSON with what happened.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from areal.api import FinetuneSpec, TrainEngine
from areal.dispatch import WorkerGroup
from areal.dispatch.errors import WorkerLostError
from areal.dispatch.ray import RayWorkers
from areal.tests.dispatch_ray import functions
from areal.tests.dist.trainer.grpo_program import COMPARED, OPTIMIZER, PLAN, STEPS, stall
from areal.tests.grid.models import model_dir
from areal.tests.harness.rl import Curve, played
from areal.tests.harness.tiny import config
from areal.trainer.checkpoints import Checkpoints
from areal.trainer.grpo import grpo_trainer
from areal.trainer.ppo import PPOTrainer

LOST_IN = 3
"""The step in which the node is lost, from 1."""

MEMORY = 100 * 2**20
"""Bytes of the object store of a node."""


def plant(flag: Path) -> Any:
    """Return a function that lets rank 3 hang in the next step, after it has written a file."""

    def on_rank(engine: TrainEngine, shard: Any) -> None:
        if os.environ["RANK"] == "3":
            stall(engine, flag)

    return on_rank


def lose_node(cluster: Cluster, node: Any, flag: Path, when: list[float]) -> None:
    """Kill a node once a file exists."""
    while not flag.exists():
        time.sleep(0.02)
    when.append(time.monotonic())
    cluster.remove_node(node, allow_graceful=False)


def main(folder: Path) -> None:
    # A head without processors, and two nodes for two processes each.
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": MEMORY})
    nodes = [cluster.add_node(num_cpus=2, object_store_memory=MEMORY) for _ in range(2)]
    ray.init(cluster.address, log_to_driver=False)
    workers = RayWorkers(
        4, processes_per_bundle=2, strategy="STRICT_SPREAD", start_seconds=300, environment={"OMP_NUM_THREADS": "1"}
    )
    ids = [info.node for info in workers.process_infos]
    environments = functions.run(workers, functions.environment)
    said: dict[str, Any] = {
        "nodes": [ids.index(each) for each in ids],
        "local": [each["LOCAL_RANK"] + "/" + each["LOCAL_WORLD_SIZE"] for each in environments],
    }

    # A run without a loss.
    with run(workers, folder / "whole") as (group, trainer, whole):
        trainer.train(STEPS)

    # The node of ranks 2 and 3 is lost while rank 3 computes, and the others wait for it. Another node takes its place.
    lost, flag, when = next(node for node in nodes if node.node_id == ids[2]), folder / "stalled", list[float]()
    with run(workers, folder / "lost") as (group, trainer, curve):
        trainer.train(LOST_IN - 1)
        group.run(plant(flag))
        threading.Thread(target=lose_node, args=(cluster, lost, flag, when), daemon=True).start()
        try:
            trainer.train(STEPS)
        except WorkerLostError as error:
            said.update(seconds=time.monotonic() - when[0], rank=error.rank, text=str(error))
        cluster.add_node(num_cpus=2, object_store_memory=MEMORY)
        group.restart()
        said["resumed"] = trainer.resume()
        trainer.train(STEPS)

    now = [info.node for info in workers.process_infos]
    said |= {"nodes now": [now.index(each) for each in now], "lost node is used": ids[2] in now}
    said["curves"] = {name: [whole[name], curve[name]] for name in COMPARED}
    workers.close()
    ray.shutdown()
    cluster.shutdown()
    print(json.dumps(said))


@contextmanager
def run(workers: RayWorkers, folder: Path) -> Iterator[tuple[WorkerGroup, PPOTrainer, Curve]]:
    """Start an engine on the ranks, with a trainer that saves a checkpoint after each step, and the curve that it logs."""
    curve, kept = Curve(), Checkpoints(folder, every=1)
    settings = config("fsdp:d4", path=model_dir("qwen3"), optimizer=OPTIMIZER)
    with WorkerGroup(settings, workers, name=folder.name) as group, ExitStack() as stack:
        group.initialize(FinetuneSpec(total_train_steps=1000))
        rollout = stack.enter_context(played(group, PLAN))
        yield group, grpo_trainer(group, rollout.runner, rollout.sync, tracker=curve, checkpoints=kept), curve


if __name__ == "__main__":
    main(Path(sys.argv[1]))
