"""Training steps on a group of Ray actors, which goes on after the loss of one.

    python examples/ray_actors.py Qwen/Qwen2.5-0.5B-Instruct
    python examples/ray_actors.py Qwen/Qwen2.5-0.5B-Instruct --kill

The loop runs in this process, and the ranks of the engine in two actors. With ``--kill``, one of them is killed after step 3. It is
replaced, and the steps after the last checkpoint are taken again, with the same losses.
"""

import os
import signal
import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer

from areal import FinetuneSpec, OptimizerConfig, SaveLoadMeta, TrainEngineConfig
from areal.dispatch import WorkerGroup
from areal.dispatch.errors import WorkerLostError
from areal.dispatch.ray import RayWorkers

TEXTS = ("The quick brown fox jumps over the lazy dog.", "To be, or not to be.", "Call me Ishmael.")
CHECKPOINTS = Path("runs/ray").absolute()


def loss(outputs, batch):
    """Return the cross-entropy: a sum, which the engine divides by the number of predicted tokens."""
    return -outputs.logprobs.sum()


def main(model: str, kill: bool) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    batch = [{"input_ids": torch.tensor(tokenizer(text)["input_ids"])} for text in TEXTS]
    config = TrainEngineConfig(path=model, backend="fsdp:d2", dtype="float32", optimizer=OptimizerConfig(lr=1e-4))
    with RayWorkers(2) as workers, WorkerGroup(config, workers) as group:
        group.initialize(FinetuneSpec(total_train_steps=6))
        step = saved = 0
        while step < 6:
            try:
                done = group.train_batch(batch, loss)  # the group divides the batch among its ranks
            except WorkerLostError as error:
                print(str(error).splitlines()[0])
                group.restart()  # new processes, with the last checkpoint
                step = saved
                continue
            step += 1
            print(f"step {step}: loss {done.loss:.5f}", flush=True)
            if step % 2 == 0:
                group.save(SaveLoadMeta(CHECKPOINTS / f"step-{step}", weight_format="dcp"))
                saved = step
            if step == 3 and kill:
                os.kill(workers.process_infos[1].pid, signal.SIGKILL)
                kill = False


if __name__ == "__main__":
    main(sys.argv[1], kill="--kill" in sys.argv)
