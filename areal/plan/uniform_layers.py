"""Extrapolation of a step from models with few layers, where all layers of a model are alike."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from areal.api import TrainEngineConfig
from areal.engine.fsdp.gradients import GradientSync, depends_on_size
from areal.engine.fsdp.pipeline.schedule_specs import choose_schedule
from areal.engine.model.heads import decoder_of
from areal.engine.model.hub import read_config
from areal.engine.model.media import IMAGE_FAMILIES
from areal.engine.torch.pipeline_split import even_counts
from areal.plan.engines.fsdp import PlannedEngine
from areal.plan.engines.planned_step import planned_engine
from areal.plan.trace import Trace, TraceRequest, trace_step


def layers_by_rank(config: TrainEngineConfig, layers: int) -> list[int]:
    """Return the number of layers of each pipeline rank.

    Args:
        config: configuration without ``megatron.first_stage_layers`` and ``last_stage_layers``.
        layers: number of layers of the model.
    """
    dims, schedule = config.dims, choose_schedule(config)
    found = [0] * dims.pp
    for chunk, count in enumerate(config.fsdp.pipeline_layers or even_counts(layers, dims.pp * dims.vpp)):
        found[schedule.rank_of(chunk, dims.pp)] += count
    return found


class UniformLayers:
    """Model directories with one and two layers per pipeline stage, in a temporary directory that ends with this object.

    Args:
        path: model directory whose layers are alike; see :meth:`of`.
    """

    def __init__(self, path: str, number: int) -> None:
        self._config, self.number = read_config(path), number
        self._folder = tempfile.TemporaryDirectory(prefix="areal-plan-")

    @classmethod
    def of(cls, path: str) -> UniformLayers | None:
        """Return the layers of a model; ``None`` if they differ, so that every layer must be run."""
        config = read_config(path)
        if config.model_type in IMAGE_FAMILIES:
            return None
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
        layers = getattr(decoder_of(model), "layers", ())
        shapes = {tuple((name, x.shape) for name, x in layer.named_parameters()) for layer in layers}
        kinds = set(getattr(config, "layer_types", None) or ())
        return cls(path, len(layers)) if len(shapes) == 1 and len(kinds) <= 1 else None

    def extrapolate(self, request: TraceRequest) -> Trace:
        """Return the trace of a stage of the full model, with the layers of the stage that has most.

        Raises:
            ValueError: the engine refuses the layout.
        """
        config, dims = request.config, request.config.dims
        chunks = dims.pp * dims.vpp
        if chunks > self.number:
            raise ValueError(
                f"backend = '{dims}' has {chunks} stages, and the model {self.number} layers: choose a smaller p or v"
            )
        if dims.backend == "megatron" and self.number % chunks:
            raise ValueError(
                f"backend = '{dims}': {self.number} layers do not split evenly over {chunks} stages; choose another p or v"
            )
        most = max(layers_by_rank(config, self.number))
        traces = []
        sync = self._grad_sync(request)
        for per_chunk in (1, 2):
            path = self._with_layers(per_chunk * chunks)
            short = config.model_copy(update={"path": path, "grad_sync": sync})
            traces.append(trace_step(*request._replace(config=short)))
        return traces[0].plus(traces[1], (most - dims.vpp) / dims.vpp)

    def _grad_sync(self, request: TraceRequest) -> str:
        """Return ``TrainEngineConfig.grad_sync``, or what a model of all layers chooses by its size, which those of few layers may not."""
        config, work = request.config, request.workload
        if config.dims.backend != "fsdp" or not depends_on_size(config) or work.sequences_at_once == work.sequences:
            return config.grad_sync
        one, two = (self._trained_elements(request, number) for number in (1, 2))
        sharded, unsharded = (a + (b - a) * (self.number - 1) for a, b in zip(one, two, strict=True))
        every = GradientSync.by_size(config, sharded, unsharded, request.memory).every
        return "micro_batch" if every else "call"

    def _trained_elements(self, request: TraceRequest, number: int) -> tuple[int, int]:
        """Return :func:`areal.engine.fsdp.gradients.trained_elements` of a rank, whose model has ``number`` layers."""
        config = request.config.model_copy(update={"path": self._with_layers(number)})
        with planned_engine(PlannedEngine, config, request.memory, request.rank) as engine:
            return engine.trained_elements()

    def _with_layers(self, number: int) -> str:
        """Return a directory with the configuration of the model, with another number of layers."""
        folder = Path(self._folder.name) / str(number)
        if not folder.exists():
            config = copy.deepcopy(self._config)
            config.num_hidden_layers = number
            if getattr(config, "layer_types", None):
                config.layer_types = (config.layer_types * number)[:number]
            config.save_pretrained(folder)
        return str(folder)
