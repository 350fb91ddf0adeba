"""Bytes that a rank of a layout holds between steps."""

from __future__ import annotations

import torch
import torch.distributed as dist

from areal.api import TrainEngineConfig
from areal.api.config import torch_dtype
from areal.engine.model.hub import read_config
from areal.engine.model.media import model_factory
from areal.plan.engines.fsdp import PlannedEngine
from areal.plan.engines.planned_step import planned_engine


def parameter_shapes(path: str) -> list[torch.Size]:
    """Return the shapes of the parameters of the model in a directory with a ``config.json``."""
    with torch.device("meta"):
        model = model_factory(config := read_config(path)).from_config(config)
    return [parameter.shape for parameter in model.parameters()]


def count_parameters(path: str) -> int:
    """Return the number of parameters of the model in a directory with a ``config.json``."""
    return sum(shape.numel() for shape in parameter_shapes(path))


def describe_state(config: TrainEngineConfig) -> str:
    """Return a sentence about the bytes of parameters, gradients and optimizer state on a rank.

    Those of the first rank of the FSDP engine are counted. Other engines, and a process in a world, get an even division.
    """
    parameters, ranks = count_parameters(config.path), config.dims.world_size
    if config.dims.backend == "fsdp" and not dist.is_initialized():
        counted, nbytes = "rank 0", _first_rank_bytes(config)
    else:
        # Gradients of the reduce dtype, and two moments of the stored dtype.
        stored, reduced = torch_dtype(config.master_dtype).itemsize, torch_dtype(config.grad_reduce_dtype).itemsize
        trained = config.optimizer is not None and config.lora is None
        counted, nbytes = (
            "a rank, if evenly divided",
            parameters * (stored + (reduced + 2 * stored if trained else 0)) // ranks,
        )
    return (
        f"{parameters:,} parameters: weights, gradients and optimizer state take {nbytes / 2**30:.2f} GiB on {counted} of {ranks}; "
        "activations come on top: areal plan predicts them"
    )


def _first_rank_bytes(config: TrainEngineConfig) -> int:
    """Return the bytes of parameters, gradients and optimizer state of the first rank of an FSDP engine."""
    # None of these changes the state, and a plan refuses all.
    fsdp = config.fsdp.model_copy(update={"compile": False, "layer_kernels": "torch", "cpu_offload": False})
    with planned_engine(PlannedEngine, config.model_copy(update={"fsdp": fsdp}), memory=1 << 36, rank=0) as engine:
        return engine.parameter_bytes() + engine.gradient_bytes() + engine.optimizer_bytes()
