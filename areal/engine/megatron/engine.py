"""The Megatron-Core engine: three hooks over models that are built from a Hugging Face configuration."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from areal.engine.lora.adapter_components import with_adapters
from areal.engine.lora.adapter_set import AdapterSet
from areal.engine.megatron import cpu

if not torch.cuda.is_available():
    cpu.install()  # before Megatron-Core, which looks for devices when it is imported

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import random
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import PretrainedConfig

from areal.api.batch import TokenOutputs
from areal.api.config import FinetuneSpec, torch_dtype
from areal.api.engine import Outputs
from areal.api.microbatch import MicroBatch
from areal.api.sections.megatron import MegatronConfig
from areal.api.sections.optimizer import OptimizerConfig
from areal.engine.attention.context_parallel import ContextParallel, context_parallel_of
from areal.engine.attention.kernels import kernel_name
from areal.engine.base import BaseTrainEngine
from areal.engine.components import EngineComponents
from areal.engine.megatron import gradients as grad
from areal.engine.megatron.checkpoint import MegatronCheckpointer
from areal.engine.megatron.lora import attach_megatron_adapters, megatron_adapter_layout
from areal.engine.megatron.model.config import check_family, check_layout, sequence_parallel, transformer_config
from areal.engine.megatron.model.float8 import rows_at_once
from areal.engine.megatron.model.packed_gpt import PackedGPT
from areal.engine.megatron.offload import MegatronOffload
from areal.engine.megatron.optimizer.chained import distributed, megatron_optimizer, overlaps_gather
from areal.engine.megatron.optimizer.muon import matrix_updates
from areal.engine.megatron.optimizer.step import step_optimizer
from areal.engine.megatron.process_groups import ProcessGroups
from areal.engine.megatron.reductions import Reductions
from areal.engine.megatron.router import megatron_expert_info
from areal.engine.megatron.schedule import MegatronSchedule
from areal.engine.megatron.weight_mapping import LocalParameter
from areal.engine.megatron.weights import MegatronWeights
from areal.engine.model.classifier import check_classifier
from areal.engine.model.hub import max_positions, read_config
from areal.engine.model.packed_lm import model_inputs
from areal.engine.moe.routing import ExpertRouting
from areal.engine.options import MODEL_OPTIONS
from areal.engine.torch.muon.updates import MatrixUpdates

if not torch.cuda.is_available():
    cpu.finish(random, moe_utils, token_dispatcher)


class MegatronEngine(BaseTrainEngine):
    """Data, tensor, pipeline, context and expert parallel training on Megatron-Core (``d t p v c e``)."""

    layout_letters: ClassVar[frozenset[str]] = frozenset("dtpvce")
    _gradients: grad.MegatronGradients | None = None
    supported_options: ClassVar[frozenset[str]] = MODEL_OPTIONS
    config_class: ClassVar[type[MegatronConfig]] = MegatronConfig

    # ---- the three hooks

    def _build(self, spec: FinetuneSpec) -> EngineComponents:
        config = self.config
        hf = read_config(config.path)
        check_classifier(config.path, hf, value_head=config.value_head)
        check_family(hf)
        check_layout(hf, self.dims, config)
        # Process groups, released after the model.
        process_groups = ProcessGroups(self.dims, self._groups)
        self._closers.append(functools.partial(self._release, process_groups))
        groups = process_groups.collection
        _prepare_process()
        # One chunk for each pipeline stage of this rank, wrapped in Megatron-Core's gradient buffers.
        megatron = transformer_config(hf, self.dims, config)
        chunks = self._build_chunks(hf, megatron, groups)
        trained = self._wrap(chunks, megatron, groups)
        weights = MegatronWeights(
            chunks,
            hf,
            groups,
            self.control,
            gradients=lambda: _by_local_parameter(grad.gather_gradients(trained)),
            finish_param_gather=lambda: grad.finish_param_gather(trained),
            onload_main_parameters=lambda: memory.onload_main_parameters(),
        )
        # The optimizer comes before the values of the weights: they also fill its float32 main parameters.
        settings = config.optimizer if config.lora is None else None
        chained = megatron_optimizer(trained, settings, config, groups) if settings else None
        memory = MegatronOffload(trained, chained, config.offload_dir)
        self._fill(weights, chained)
        optimizer = None
        if chained and settings:
            matrices = self._matrices(chained, weights, settings, groups)
            optimizer = step_optimizer(chained, trained, settings, spec.total_train_steps, self.device, matrices)
        reductions = Reductions(trained)
        schedule = MegatronSchedule(list(trained), reductions, megatron, groups, self.timer)
        cp = context_parallel_of(hf, self.dims, config.megatron.context_parallel, self.mesh["cp"])
        splits_sequence = sequence_parallel(self.dims, config)
        self._gradients = grad.MegatronGradients(trained, chained, reductions, groups, memory)
        components = EngineComponents(
            model=nn.ModuleList(trained),
            schedule=schedule,
            context_parallel=cp,
            optimizer=optimizer,
            checkpointer=MegatronCheckpointer(
                trained,
                chained,
                optimizer,
                weights,
                groups,
                self,
                self.control,
                config.path,
            ),
            weights=weights,
            memory=memory,
            gradients=self._gradients,
            vocab_size=hf.vocab_size,
            max_positions=max_positions(hf),
            token_multiple=(self.dims.tp if splits_sequence else 1) * rows_at_once(config),
            routing=ExpertRouting(
                config.moe,
                megatron_expert_info(megatron),
                [cp, ContextParallel(groups.tp)] if splits_sequence else [cp],
                stages=self.dims.pp,
            ),
            applied=self._describe(cp, groups),
            n_parameters=weights.n_parameters,
            n_local_parameters=sum(parameter.numel() for chunk in trained for parameter in chunk.parameters()),
        )
        # Adapters replace what trains, saves and streams the model.
        if config.lora is None:
            return components
        adapters = AdapterSet(hf, megatron_adapter_layout(chunks, hf, groups, self.control), config, spec, self.control)
        attach_megatron_adapters(chunks, hf, adapters)
        return with_adapters(components, weights, adapters, self)

    def _forward_compute_mb(
        self, model: nn.Module, mb: MicroBatch, *, outputs: Outputs, hidden: Tensor | None = None
    ) -> Any:
        components = self._require_components()
        cp, temperature = components.context_parallel, self.config.temperature
        out = model(model_inputs(mb, cp, outputs, temperature, rows=False, routing=components.routing))
        return TokenOutputs(**out) if isinstance(out, dict) else out

    def _finalize_grads(self) -> None:
        if self._gradients is not None:
            self._gradients.finalize()

    # ---- how the components are built

    def _release(self, groups: ProcessGroups) -> None:
        """Release the references that this engine has to its process groups."""
        self._gradients = None
        groups.release()

    def _build_chunks(
        self, hf: PretrainedConfig, megatron: TransformerConfig, groups: ProcessGroupCollection
    ) -> list[PackedGPT]:
        """Build the model of each of this rank's pipeline stages, without weights."""
        config = self.config
        return [
            PackedGPT(
                hf,
                megatron,
                groups,
                vp_stage=number if self.dims.vpp > 1 else None,
                value_head=config.value_head,
                fp32_head=config.fp32_head,
                keep_bytes=config.kept_logits_bytes,
                adapted=config.lora is not None,
            ).to(self.device)
            for number in range(self.dims.vpp)
        ]

    def _fill(self, weights: MegatronWeights, optimizer: ChainedOptimizer | None) -> None:
        """Fill the parameters, and the main parameters of the optimizer."""
        weights.load(self.config, optimizer)

    def _matrices(
        self,
        chained: ChainedOptimizer,
        weights: MegatronWeights,
        settings: OptimizerConfig,
        groups: ProcessGroupCollection,
    ) -> MatrixUpdates | None:
        """Build the updates of matrices; ``None`` without Muon."""
        if settings.type != "muon":
            return None
        dtype = torch.promote_types(torch_dtype(self.config.dtype), torch.float32)
        like = torch.empty(0, dtype=dtype, device=self.device)
        return matrix_updates(chained, weights.local_params, settings.muon, self.control, groups.intra_dist_opt, like)

    def _describe(self, cp: ContextParallel, groups: ProcessGroupCollection) -> dict[str, str]:
        """Describe what was applied, for the log."""
        config = self.config
        replicas = groups.dp_cp.size()
        # Adapters have their own optimizer, with replicated state.
        sharded = distributed(config) and config.optimizer is not None and config.lora is None
        sharding = f"optimizer state over {replicas} ranks" if sharded else f"none, {replicas} replicas"
        if self.dims.ep > 1:
            sharding += f", experts over {self.dims.ep} ranks"
        if sequence_parallel(self.dims, config):
            sharding += f", sequence parallel over {self.dims.tp} ranks"
        attention = f"{kernel_name(self.device, torch_dtype(config.dtype))}, packed sequences"
        if cp.size > 1:
            attention += f", {cp.mode} over {cp.size} ranks"
        return {
            "sharding": f"Megatron-Core, {sharding}",
            "attention kernel": attention,
            "activation checkpointing": config.activation_checkpointing,
            "compile": "off",
            **({} if config.megatron.fp8_recipe is None else {"float8": config.megatron.fp8_recipe}),
            "gradient reduction": "in the last backward of train_batch"
            if config.megatron.overlap_grad_reduce and config.lora is None
            else "once per call",
        }

    def _wrap(
        self, chunks: list[PackedGPT], megatron: TransformerConfig, groups: ProcessGroupCollection
    ) -> list[DistributedDataParallel]:
        """Wrap the chunks in Megatron-Core's data parallelism, which owns the gradient buffers."""
        settings = self.config.megatron
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=self.config.grad_reduce_dtype == "float32",
            overlap_grad_reduce=settings.overlap_grad_reduce,
            overlap_param_gather=overlaps_gather(self.config),
            use_distributed_optimizer=distributed(self.config),
            bucket_size=settings.bucket_size,
        )
        return [
            DistributedDataParallel(megatron, ddp, chunk, disable_bucketing=number > 0, pg_collection=groups).train()
            for number, chunk in enumerate(chunks)
        ]


def _prepare_process() -> None:
    """Create Megatron-Core's global state of a process: scratch memory, and random states, which these models do not use."""
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
    random.initialize_rng_tracker(inference_rng_tracker=True)


def _by_local_parameter(value: Callable[[nn.Parameter], Tensor]) -> Callable[[LocalParameter], Tensor]:
    return lambda local: value(local.parameter)
