"""verl's worker group on Ray actors, without a GPU: prints the losses of three steps as JSON. Arguments as for ``rl_worker``."""

from __future__ import annotations

import json
import sys
from typing import Any

import ray
from verl.single_controller.ray.base import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils import tensordict_utils as tu
from verl.workers.engine_workers import TrainingWorker

from areal.api import ParallelDims
from areal.tests.verl.rl_worker import in_verls_form, loss_function, old_and_reference, padded_batch, worker_config


def main(model: str, role: str, engine: str, folder: str) -> None:
    ray.init(num_cpus=4, include_dashboard=False)
    config = worker_config(model, role, engine)
    size = ParallelDims.parse(engine).world_size
    pool = RayResourcePool([size], use_gpu=False, max_colocate_count=1)
    group = RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(TrainingWorker), config=config), device_name="cpu")
    group.reset()
    group.set_loss_fn(loss_function(role, config.engine_config.strategy))
    whole = padded_batch()
    asked = in_verls_form(role, whole, whole)
    tu.assign_non_tensor(asked, compute_loss=False)
    outputs = group.infer_batch(asked).get()
    whole |= old_and_reference(whole, [row.tolist() for row in outputs["log_probs"].unbind()])
    losses: list[Any] = []
    for _ in range(3):
        data = in_verls_form(role, whole, whole)
        tu.assign_non_tensor(data, update_lr_scheduler=True)
        losses.append(tu.get(group.train_batch(data).get(), "metrics")["loss"])
    print("SAID " + json.dumps({"losses": losses}))
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
