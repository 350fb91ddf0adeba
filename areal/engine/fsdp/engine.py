"""The FSDP2 engine: three hooks over Hugging Face causal language models."""

from __future__ import annotations

import copy
import functools
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM, PretrainedConfig

from areal.api.batch import TokenOutputs
from areal.api.config import FinetuneSpec, FSDPConfig, OptimizerConfig, TrainEngineConfig, torch_dtype
from areal.api.engine import Outputs
from areal.api.microbatch import MicroBatch
from areal.engine.attention.context_parallel import context_parallel_of
from areal.engine.attention.huggingface import PACKED_ATTENTION, check_sharing, choose_attention
from areal.engine.base import BaseTrainEngine
from areal.engine.components import EngineComponents
from areal.engine.fsdp import gradients as grad
from areal.engine.fsdp.checkpoint import FSDPCheckpointer
from areal.engine.fsdp.compile import compile_layers
from areal.engine.fsdp.expert_parallel import check_experts
from areal.engine.fsdp.lora import attach_fsdp_adapters, fsdp_adapter_layout
from areal.engine.fsdp.offload import HostOffload
from areal.engine.fsdp.parallelize import build_expert_mesh, build_param_mesh, parallelize, transformer_layers
from areal.engine.fsdp.pipeline.model_chunks import ModelChunks
from areal.engine.fsdp.pipeline.schedule import PipelineSchedule
from areal.engine.fsdp.pipeline.schedule_specs import check_pipeline_attention, choose_schedule
from areal.engine.fsdp.pipeline.split import plan_split
from areal.engine.fsdp.pipeline.tied_embedding import TiedGradients
from areal.engine.fsdp.router import ROUTERS, find_experts, watch_routers
from areal.engine.fsdp.tensor_parallel import check_plan
from areal.engine.fsdp.weights import FSDPWeights, init_weights, load_weights
from areal.engine.lora.adapter_set import AdapterSet
from areal.engine.lora.components import with_adapters
from areal.engine.model.hub import read_config
from areal.engine.model.inputs import model_inputs
from areal.engine.model.packed_lm import PackedCausalLM
from areal.engine.moe.routing import ExpertRouting
from areal.engine.optimizer import ClippingOptimizer, torch_optimizer
from areal.engine.options import MODEL_OPTIONS
from areal.engine.schedule import Schedule, SequentialSchedule
from areal.utils.bf16_adamw import BFloat16AdamW
from areal.utils.distributed import destroy_groups
from areal.utils.dtensor import reshard


class FSDPEngine(BaseTrainEngine):
    """Data (``d``), replicated data (``r``) and context parallel (``c``) training of any Hugging Face causal LM; tensor parallel (``t``) of
    families with a plan; pipelines (``p``, ``v``) of decoders that are a chain of layers; experts
    spread over ranks (``e``)."""

    layout_letters: ClassVar[frozenset[str]] = frozenset("drctpve")
    supported_options: ClassVar[frozenset[str]] = MODEL_OPTIONS | {"grad_sync"}
    config_class: ClassVar[type[FSDPConfig]] = FSDPConfig

    def __init__(self, config: TrainEngineConfig) -> None:
        super().__init__(config)
        self._kind = choose_schedule(config)
        self._last_stage = self._kind.rank_of(self.dims.pp * self.dims.vpp - 1, self.dims.pp)

    # ---- the three hooks

    def _build(self, spec: FinetuneSpec) -> EngineComponents:
        config = self.config
        hf_config = read_config(config.path)
        self._rows = choose_attention(hf_config, config.fsdp.attention, self.dims.cp) == "rows"
        check_sharing(config.mb_spec, packed=not self._rows)
        check_plan(hf_config, self.dims.tp, packed=not self._rows)
        check_pipeline_attention(self.dims, packed=not self._rows)
        param_mesh = build_param_mesh(self.dims, self.device.type)
        self._closers.append(functools.partial(self._close, param_mesh))
        expert_mesh = build_expert_mesh(self.dims, self.device.type) if self.dims.ep > 1 else None
        if expert_mesh is not None:
            self._closers.append(functools.partial(destroy_groups, expert_mesh))
        chunks = self._build_chunks(hf_config, param_mesh, expert_mesh)
        cp = context_parallel_of(hf_config, self.dims, config.fsdp.context_parallel, self.mesh["cp"])
        self._tied = TiedGradients(chunks)
        optimizer = self._build_optimizer(chunks, spec)
        memory = HostOffload(chunks, optimizer.inner if optimizer else None, config.offload_dir)
        weights = FSDPWeights(chunks)
        experts = find_experts(transformer_layers(chunks.whole))
        parts = EngineComponents(
            model=chunks,
            schedule=self._schedule(chunks),
            context_parallel=cp,
            optimizer=optimizer,
            checkpointer=FSDPCheckpointer(chunks, optimizer, self, self.control, config.path),
            weights=weights,
            memory=memory,
            zero_grad=memory.discard_grads,
            vocab_size=chunks.whole.vocab_size,
            token_split=self.dims.tp,
            recover=lambda: _recover(chunks),
            before_backward=self._tied.before_backward,
            routing=ExpertRouting(
                config.moe,
                experts,
                [cp],
                stages=self.dims.pp,
                why_none=f"no router of {hf_config.model_type!r} is one of {', '.join(ROUTERS)}",
            ),
        )
        if config.lora is None:
            return parts
        adapters = AdapterSet(
            hf_config, fsdp_adapter_layout(chunks, param_mesh, self.device), config, spec, self.control
        )
        attach_fsdp_adapters(chunks, lambda: adapters.active)
        return with_adapters(parts, weights, adapters, self)

    def _forward_compute_mb(
        self, model: nn.Module, mb: MicroBatch, *, outputs: Outputs, hidden: Tensor | None = None
    ) -> Any:
        parts = self._require_components()
        inputs = model_inputs(
            mb, parts.context_parallel, outputs, self.config.temperature, rows=self._rows, routing=parts.routing
        )
        out = model(inputs, hidden)
        return out if isinstance(out, Tensor) else TokenOutputs(**out)

    def _finalize_grads(self) -> None:
        """Every call reduces over data-parallel ranks itself. Stages may still have to sum that of a tied embedding."""
        self._tied.sum()

    # ---- what the parts are made of

    def _close(self, param_mesh: DeviceMesh) -> None:
        """Connections close with the last reference to a group: let go of what holds any."""
        self.__dict__.pop("_tied", None)
        destroy_groups(param_mesh)

    def _schedule(self, chunks: ModelChunks) -> Schedule:
        config = self.config
        if self.dims.pp > 1:
            dtype, split = torch_dtype(config.dtype), self.dims.cp * self.dims.tp
            return PipelineSchedule(chunks, self._kind, self.device, dtype, split, self.timer)
        model = chunks[0]
        return SequentialSchedule(
            model,
            before_backward=grad.sync_on(model, every=config.grad_sync == "micro_batch"),
            # A gathered weight that outlives an optimizer step would be used again, stale.
            rest=lambda: reshard(model),
            timer=self.timer,
        )

    def _build_chunks(
        self, hf_config: PretrainedConfig, param_mesh: DeviceMesh, expert_mesh: DeviceMesh | None
    ) -> ModelChunks:
        config = self.config
        whole = self._whole_model(hf_config)
        check_experts(hf_config, whole, self.dims)
        chunks = ModelChunks.cut(whole, plan_split(whole, self.dims, self._kind, config.fsdp), self.mesh["pp"])
        layers = transformer_layers(whole)
        if config.fsdp.compile:
            # First of all: graphs are of what layers compute, and what comes next stays outside.
            compile_layers(
                [layer for chunk in chunks for layer in transformer_layers(chunk)], config.fsdp.compile_backend
            )
        for stage, chunk in zip(chunks.stages, chunks, strict=True):
            if find_experts(layers).layers:
                before = find_experts(layers[: chunks.split.spans[stage].start]).layers
                watch_routers(transformer_layers(chunk), before)
            parallelize(chunk, param_mesh, config, expert_mesh)
            grad.time_reductions(chunk, self.timer)
        device = torch.device("cpu") if config.fsdp.cpu_offload else self.device
        if config.init_from_scratch:
            init_weights(chunks, config.seed, device)
        else:
            load_weights(chunks, config.path, device)
        chunks.train()
        return chunks

    def _whole_model(self, hf_config: PretrainedConfig) -> PackedCausalLM:
        """On the meta device."""
        config = self.config
        options: dict[str, Any] = {} if self._rows else {"attn_implementation": PACKED_ATTENTION}
        if config.dtype == "float64":  # The grouped matrix product has no float64 kernel.
            options["experts_implementation"] = "eager"
        with torch.device("meta"):
            hf = AutoModelForCausalLM.from_config(
                # A copy: building a model writes the implementations into the configuration that it is given.
                copy.deepcopy(hf_config),
                dtype=torch_dtype(config.master_dtype),
                **options,
            )
            if not self._rows and hf.config._attn_implementation != PACKED_ATTENTION:
                raise ValueError(f"{type(hf).__name__} did not take the packed attention: set fsdp.attention='rows'")
            model = PackedCausalLM(
                hf,
                value_head=config.value_head,
                fp32_head=config.fp32_head,
                keep_bytes=config.kept_logits_bytes,
            )
            if config.lora is not None:
                model.requires_grad_(False)
        return model

    def _build_optimizer(self, chunks: ModelChunks, spec: FinetuneSpec) -> ClippingOptimizer | None:
        config = self.config.optimizer
        named = chunks.trained()
        if config is None or not named:
            return None
        copies = {id(copy) for copy in chunks.copies()}
        parameters = [parameter for _, parameter in named]
        counted = [parameter for parameter in parameters if id(parameter) not in copies]
        return ClippingOptimizer(
            self._torch_optimizer(named, config),
            config,
            spec.total_train_steps,
            global_norm=lambda: grad.global_norm(counted, chunks.group),
            scale_grads=lambda factor: grad.scale(parameters, factor),
        )

    def _torch_optimizer(self, named: list[tuple[str, nn.Parameter]], config: OptimizerConfig) -> torch.optim.Optimizer:
        names, parameters = zip(*named, strict=True)
        if self.config.fsdp.optimizer_state_dtype == "float32":
            return torch_optimizer(parameters, config)
        return BFloat16AdamW(
            parameters,
            names=names,
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
            seed=self.config.seed,
        )


def _recover(chunks: ModelChunks) -> bool:
    """Drop what a failed micro-batch left in FSDP's hooks. Torch can do that from 2.13 on, but for gradients not yet reduced."""
    if not hasattr(FSDPModule, "reset_iter_state"):
        return False
    for chunk in chunks:
        chunk.reset_iter_state()  # type: ignore[operator]
    for module in chunks.modules():
        if isinstance(module, FSDPModule):
            grad.discard_unreduced(module)
    return True
