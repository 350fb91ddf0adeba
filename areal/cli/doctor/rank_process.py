"""Process of one rank: ``python -m areal.cli.doctor.rank_process RANK FOLDER``. Rank 0 also lists devices and imports all engines.

Results are lines of JSON in a file, which are complete up to the point at which a process died or was killed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig

from areal.api import FinetuneSpec, MicroBatchSpec, OptimizerConfig, TokenOutputs, TrainEngineConfig
from areal.engine.registry import create_engine, engine_class, engine_names
from areal.utils import platform
from areal.utils.distributed import enter_world

RESULTS, PORT = "results.jsonl", "port"
"""Names of files in the folder of a check."""

LOOPBACK = "127.0.0.1"

_VOCABULARY, _SAMPLES, _STEPS = 64, 4, 2


def run_rank(rank: int, folder: Path) -> None:
    """Run the process of a rank."""
    torch.set_num_threads(1)
    if rank > 0:
        port = _wait_for(folder / PORT)
        _train_on_two(rank, folder, int(port))
        return
    record = Record(folder / RESULTS)
    record.write(devices=describe_devices())
    LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    ).save_pretrained(folder)
    record.stage("training on one rank")
    record.write(one=train(folder, "fsdp:d1", 0, 1))
    dist.destroy_process_group()
    for name in engine_names():
        record.stage(f"importing the engine {name!r}")
        record.write(engine=name, **try_engine(name))
    record.stage("connecting two ranks over the loopback interface")
    # Rank 1 connects to this store once it can read the complete port.
    store = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    (folder / "port.part").write_text(str(store.port))
    (folder / "port.part").rename(folder / PORT)
    record.write(two=_train_on_two(rank, folder, store.port))
    record.stage("")


class Record:
    """Results so far, in a file that another process reads."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, **values: Any) -> None:
        """Append one result."""
        with self._path.open("a") as file:
            file.write(json.dumps(values) + "\n")

    def stage(self, stage: str) -> None:
        """Append the name of what comes next."""
        self.write(stage=stage)


def describe_devices() -> list[str]:
    """Return a line for the CPU and for each GPU."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cpu = f"CPU: {cores} cores"
    if platform.accelerator() == "cpu":
        return [f"{cpu}; torch sees no GPU"]
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    nccl = "with" if dist.is_nccl_available() else "without"
    return [cpu] + [
        f"GPU {index}: {gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}, {nccl} NCCL"
        for index, gpu in enumerate(gpus)
    ]


def try_engine(name: str) -> dict[str, Any]:
    """Import an engine. Returns its layouts, or the error."""
    try:
        engine = engine_class(name)
    except Exception as error:  # a module of another package may raise anything
        cause = error.__cause__
        missing = cause.name if isinstance(cause, ModuleNotFoundError) else None
        return {"error": f"{type(error).__name__}: {error}", "missing": missing}
    return {"letters": "".join(sorted(getattr(engine, "layout_letters", "")))}


def train(folder: Path, backend: str, rank: int, size: int) -> list[float]:
    """Train a random model for a few steps. Returns losses and gradient norms, which do not depend on the layout.

    Args:
        folder: folder with the configuration of the model.
        backend: a layout of ``size`` data-parallel ranks.
        rank, size: rank of this process, and number of ranks.
    """
    config = TrainEngineConfig(
        path=str(folder),
        backend=backend,
        init_from_scratch=True,
        dtype="float32",
        mb_spec=MicroBatchSpec(max_tokens_per_mb=64),
        optimizer=OptimizerConfig(lr=1e-2),
    )
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, _VOCABULARY, (_SAMPLES, 16), generator=generator)[rank::size]
    batch = [{"input_ids": row, "loss_mask": torch.ones(len(row))} for row in ids]
    numbers = []
    with create_engine(config) as engine:
        engine.initialize(FinetuneSpec(total_train_steps=10))
        for _ in range(_STEPS):
            step = engine.train_batch(batch, _negative_logprob)
            numbers += [float(step.loss), step.grad_norm or 0.0]
    return numbers


def _negative_logprob(outputs: TokenOutputs, mb: Any) -> torch.Tensor:
    return -(outputs.logprobs * mb["loss_mask"]).sum()


def _train_on_two(rank: int, folder: Path, port: int) -> list[float]:
    enter_world(rank, 2, (rank, 2), LOOPBACK, port)
    return train(folder, "fsdp:d2", rank, 2)


def _wait_for(path: Path) -> str:
    """Return the content of a file once it exists. The process is killed if that takes too long."""
    while not path.exists():
        time.sleep(0.02)
    return path.read_text()


if __name__ == "__main__":
    run_rank(int(sys.argv[1]), Path(sys.argv[2]))
    dist.destroy_process_group()
