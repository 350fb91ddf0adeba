"""The JAX engine: three hooks over a decoder that JAX compiles."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import jax
import torch
from torch import Tensor

from areal.api.batch import TokenOutputs, TopKOutput
from areal.api.config import FinetuneSpec, TrainEngineConfig, torch_dtype
from areal.api.engine import Outputs
from areal.api.microbatch import MicroBatch
from areal.api.sections.jax import JAXConfig
from areal.engine.attention.context_parallel import ContextParallel
from areal.engine.base import BaseTrainEngine
from areal.engine.components import EngineComponents
from areal.engine.jax.bridge import ForwardCall
from areal.engine.jax.checkpoint import JAXCheckpointer
from areal.engine.jax.inputs import LocalStreams, Sizes
from areal.engine.jax.lora.factors import FactorStacks, jax_adapter_layout
from areal.engine.jax.mesh import build_mesh, check_experts_of
from areal.engine.jax.model.architecture import Architecture, meta_model, parameters_of
from areal.engine.jax.model.spec import ModelSpec
from areal.engine.jax.model_arrays import ModelGradients, ModelState, norm_of_gradients, scale_grads
from areal.engine.jax.muon import check_muon
from areal.engine.jax.offload import JAXMemory
from areal.engine.jax.optimizer import OptaxOptimizer
from areal.engine.jax.runtime import world
from areal.engine.jax.runtime.compilation import CompileWatch, use_cache
from areal.engine.jax.weights import JAXWeights
from areal.engine.lora.adapter_components import with_adapters
from areal.engine.lora.adapter_set import AdapterSet
from areal.engine.model.classifier import check_classifier
from areal.engine.model.hub import max_positions, model_folder, read_config
from areal.engine.moe.routing import ExpertRouting
from areal.engine.optimizer import ClippingOptimizer
from areal.engine.options import OPTIMIZER_OPTIONS, TEMPLATE_OPTIONS
from areal.engine.schedule import SequentialSchedule
from areal.utils.data.sequences import ROUTED_EXPERTS
from areal.utils.functional.logprobs import default_keep_bytes


class JAXEngine(BaseTrainEngine):
    """Training of Hugging Face decoders in JAX: one compiled program for each shape of a micro-batch.

    Sharded data (``d``), replicated data (``r``), context parallelism (``c``), tensor parallelism (``t``) and expert parallelism (``e``), by
    the partitioner of XLA.
    """

    layout_letters: ClassVar[frozenset[str]] = frozenset("drcte")
    supported_options: ClassVar[frozenset[str]] = TEMPLATE_OPTIONS | {
        *("dtype", "master_dtype", "grad_reduce_dtype", "init_from_scratch", "value_head", "temperature", "fp32_head"),
        *(
            "kept_logits_mb",
            "mb_spec",
            *OPTIMIZER_OPTIONS,
            "optimizer.muon",
            "activation_checkpointing",
            "offload_dir",
            "lora",
        ),
    }
    config_class: ClassVar[type[JAXConfig]] = JAXConfig

    @classmethod
    def ranks_per_process(cls, config: TrainEngineConfig) -> int:
        return config.jax.devices_per_process

    # ---- the three hooks

    def _build(self, spec: FinetuneSpec) -> EngineComponents:
        config = self.config
        check_muon(config)
        use_cache(config.jax.compilation_cache)
        self._join(config.jax)
        hf_config = read_config(config.path)
        check_classifier(config.path, hf_config, value_head=config.value_head)
        hf = meta_model(hf_config, torch_dtype(config.master_dtype))
        arrays = parameters_of(hf, value_head=config.value_head)
        architecture = Architecture.of(hf)
        check_experts_of(self.dims, architecture.experts.n_experts if architecture.experts else None)
        # JAX numbers processes in its own way on some platforms.
        processes = self.control.gather(jax.process_index())
        mesh = build_mesh(self.dims, processes, config.jax.devices_per_process)
        self._spec = ModelSpec.of(config, architecture, mesh, default_keep_bytes(self.device))
        model = ModelState(self._spec, arrays)
        weights = JAXWeights(model, hf)
        if config.init_from_scratch:
            weights.draw(config.seed)
        else:
            folder = model_folder(config.path)
            weights.check(folder)
            weights.read(folder)
        optimizer = self._build_optimizer(model, spec) if config.lora is None else None
        memory = JAXMemory(model, optimizer.inner if optimizer else None, config.offload_dir)
        components = EngineComponents(
            model=model,
            schedule=SequentialSchedule(model, timer=self.timer),
            context_parallel=ContextParallel(None),
            streams=self._n_streams,
            optimizer=optimizer,
            checkpointer=JAXCheckpointer(model, optimizer, weights, self, self.control, config.path),
            weights=weights,
            memory=memory,
            gradients=ModelGradients(model, memory.discard_grads),
            vocab_size=hf.config.vocab_size,
            max_positions=max_positions(hf.config),
            routing=ExpertRouting(config.moe, architecture.routers, ()),
            applied=self._describe(),
            n_parameters=model.n_parameters,
            n_local_parameters=model.n_local,
        )
        # Adapters replace what trains, saves and streams the model.
        if config.lora is None:
            return components
        layout = jax_adapter_layout(hf, self.dp_group, self.device, torch_dtype(config.master_dtype))
        adapters = AdapterSet(hf.config, layout, config, spec, self.control)
        model.factors = FactorStacks(self._spec, hf, adapters)
        return with_adapters(components, weights, adapters, self)

    def _forward_compute_mb(
        self, model: ModelState, mb: MicroBatch, *, outputs: Outputs, hidden: Tensor | None = None
    ) -> TokenOutputs:
        inputs = LocalStreams(mb, outputs, self.config.temperature, self._n_streams)
        # All ranks run the same program.
        sizes = Sizes.largest(self.control.gather(inputs.sizes)) if self.control.size > 1 else inputs.sizes
        arrays = inputs.arrays(sizes, self._spec.numbers.stats, self.dims.cp, self._spec.block)
        self._compiles.shapes = f"{arrays['ids'].shape[1]} tokens, {arrays['places'].shape[1]} rows"
        placed = {name: self._spec.from_local(values) for name, values in arrays.items()}
        factors = None if model.factors is None else model.factors.stack(inputs.adapters, sizes)
        spec = replace(self._spec, kernel=None) if sizes.shared else self._spec
        call = ForwardCall(spec, inputs.wanted, model, placed, factors)
        rows = call.differentiable() if torch.is_grad_enabled() else call.evaluate()
        values = {name: inputs.result(name, value.to(self.device)) for name, value in rows.items()}
        best, ids, experts = (values.pop(name, None) for name in ("topk", "topk_ids", ROUTED_EXPERTS))
        topk = None if best is None or ids is None else TopKOutput(best, ids.long())
        return TokenOutputs(**values, topk=topk, routed_experts=None if experts is None else experts.long())

    def profile(
        self, folder: str | Path, *, memory: bool = True, stacks: bool = False
    ) -> AbstractContextManager[dict[int, Path]]:
        """Profile as every engine does, with a trace of JAX's programs in addition."""
        profile = super().profile(folder, memory=memory, stacks=stacks)
        return traced(profile, self.control.rank, stacks=stacks)

    def _finalize_grads(self) -> None:
        """Do nothing: each backward has added a sum over ranks."""

    # ---- parts

    @property
    def _n_streams(self) -> int:
        """Streams that the devices of this process compute; those of others have the rest of the tokens or products of some."""
        return self.dims.dp // self._processes.dp

    def _join(self, config: JAXConfig) -> None:
        """Join the other processes in JAX. A fault that ends the engine wakes them, and ends their world."""
        self._groups.on_abort(world.abort)
        self._closers.append(functools.partial(world.leave_after_fault, self.control))
        heartbeat = self.config.heartbeat_timeout
        world.join_world(self.control, config.coordinator, self.device, heartbeat, config.devices_per_process)
        self._compiles = CompileWatch(functools.partial(self.timer.move, "compile"), logs=self.control.rank == 0)
        self._closers.append(self._compiles.close)

    def _build_optimizer(self, model: ModelState, spec: FinetuneSpec) -> ClippingOptimizer[OptaxOptimizer] | None:
        config = self.config.optimizer
        if config is None:
            return None
        return ClippingOptimizer(
            OptaxOptimizer(model, config),
            config,
            spec.total_train_steps,
            global_norm=lambda: norm_of_gradients(model),
            scale_grads=lambda factor: scale_grads(model, factor),
        )

    def _describe(self) -> dict[str, Any]:
        """Describe what was applied, for the log."""
        platform = self._spec.mesh.devices.flat[0].platform
        return {
            "sharding": f"GSPMD, mesh {dict(self._spec.mesh.shape)} of {platform}",
            "attention kernel": self._spec.kernel.name if self._spec.kernel else "blocks of packed sequences",
            "activation checkpointing": self.config.activation_checkpointing,
            "compile": "each shape of a micro-batch",
            "gradient reduction": "on each micro-batch",
        }


@contextmanager
def traced(profile: AbstractContextManager[dict[int, Path]], rank: int, *, stacks: bool) -> Iterator[dict[int, Path]]:
    """Add a trace of JAX, in the subfolder ``jax-rank0`` of rank 0 and so on, to a profile of the template.

    Args:
        profile: context that gives the folder of each rank.
        rank: int. Number in the name of the subfolder.
        stacks: add calls of Python functions.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = int(stacks)
    with profile as folders, jax.profiler.trace(str(folders[rank] / f"jax-rank{rank}"), profiler_options=options):
        yield folders
