"""The FSDP2 engine: three hooks over Hugging Face causal language models."""

from __future__ import annotations

import copy
import functools
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from transformers import PretrainedConfig

from areal.api.batch import TokenOutputs
from areal.api.config import FinetuneSpec, TrainEngineConfig, torch_dtype
from areal.api.engine import Outputs
from areal.api.microbatch import MicroBatch
from areal.api.sections.fsdp import FSDPConfig
from areal.api.sections.optimizer import OptimizerConfig
from areal.engine.attention.context_parallel import ContextParallel, context_parallel_of
from areal.engine.attention.huggingface import INVARIANT_ATTENTION, PACKED_ATTENTION
from areal.engine.base import BaseTrainEngine
from areal.engine.batch_rules import check_sharing
from areal.engine.components import EngineComponents
from areal.engine.fsdp import gradients as grad
from areal.engine.fsdp.activation_offload import offload_activations
from areal.engine.fsdp.expert_parallel import check_experts
from areal.engine.fsdp.layers import attention_kernel, describe_layers, prepare_layers
from areal.engine.fsdp.lora import attach_fsdp_adapters, fsdp_adapter_layout
from areal.engine.fsdp.parallelize import parallelize, transformer_layers
from areal.engine.fsdp.pipeline.schedule import PipelineSchedule
from areal.engine.fsdp.pipeline.schedule_specs import check_pipeline_attention, choose_schedule
from areal.engine.fsdp.pipeline.tied_embedding import TiedGradients
from areal.engine.fsdp.router import fsdp_expert_info, watch_routers, why_no_router
from areal.engine.fsdp.tensor_plans import check_plan
from areal.engine.lora.adapter_components import with_adapters
from areal.engine.lora.adapter_set import AdapterSet
from areal.engine.model.classifier import check_classifier
from areal.engine.model.forward_plan import plan_forward
from areal.engine.model.fused_layers import LayerFunctions
from areal.engine.model.heads import learns_positions
from areal.engine.model.hub import cast_parameters, max_positions, read_config
from areal.engine.model.invariant import EXPERTS, check_invariant_model
from areal.engine.model.liger import liger_functions
from areal.engine.model.media import check_media, image_rules, media_tokens, model_factory
from areal.engine.model.packed_lm import PackedCausalLM, model_inputs
from areal.engine.model.vision import attention_by_part, check_image_layout, vision_parts
from areal.engine.moe.routing import ExpertRouting
from areal.engine.optimizer import ClippingOptimizer, adamw_settings, global_norm, scale, torch_optimizer
from areal.engine.options import MODEL_OPTIONS
from areal.engine.recurrence.head_exchange import check_heads
from areal.engine.recurrence.rows import check_whole_runs
from areal.engine.schedule import Schedule, SequentialSchedule
from areal.engine.torch.activations.offload import ActivationOffload
from areal.engine.torch.checkpoint import ShardedCheckpointer
from areal.engine.torch.model_chunks import ModelChunks
from areal.engine.torch.muon.matrices import matrices_of
from areal.engine.torch.muon.optimizer import Muon
from areal.engine.torch.offload import ShardedOffload
from areal.engine.torch.pipeline_split import plan_pipeline_split
from areal.engine.torch.weights import ShardedWeights, init_weights, load_weights
from areal.utils import platform
from areal.utils.bf16_adamw import BFloat16AdamW
from areal.utils.dtensor import local_part, local_shard, reshard
from areal.utils.mesh import build_expert_mesh, build_param_mesh, describe_mesh, group_of_all_ranks, release_groups
from areal.utils.releases import reset_iter_state


class FSDPEngine(BaseTrainEngine):
    """Training of Hugging Face causal language models with FSDP2.

    Any model: sharded data (``d``), replicated data (``r``) and context parallelism (``c``). Families with a plan: tensor parallelism
    (``t``). Decoders that are a chain of layers: pipelines (``p``, ``v``). Stacked experts: expert parallelism (``e``).
    """

    layout_letters: ClassVar[frozenset[str]] = frozenset("drctpve")
    _gradients: grad.FSDPGradients | None = None
    _activations: ActivationOffload | None = None
    supported_options: ClassVar[frozenset[str]] = MODEL_OPTIONS | {"grad_sync"}
    config_class: ClassVar[type[FSDPConfig]] = FSDPConfig

    def __init__(self, config: TrainEngineConfig) -> None:
        super().__init__(config)
        self._schedule_spec = choose_schedule(config)
        self._last_stage = self._schedule_spec.rank_of(self.dims.pp * self.dims.vpp - 1, self.dims.pp)

    # ---- the three hooks

    def _build(self, spec: FinetuneSpec) -> EngineComponents:
        # Refuse what cannot run, before any group or tensor exists.
        config = self.config
        hf_config = read_config(config.path)
        check_classifier(config.path, hf_config, value_head=config.value_head)
        check_media(hf_config, text_only=config.fsdp.text_only, freeze_vision=config.fsdp.freeze_vision)
        images = image_rules(hf_config, text_only=config.fsdp.text_only)
        plan = plan_forward(hf_config, config.fsdp.attention, self.dims, fp32_head=config.fp32_head)
        self._rows, self._own_head = not plan.packed, plan.own_head
        if images is not None:
            check_image_layout(self.dims, packed=not self._rows)
        check_sharing(config.mb_spec, possible=not self._rows)
        check_plan(hf_config, self.dims, packed=not self._rows)
        check_pipeline_attention(self.dims, packed=not self._rows)
        if config.fsdp.batch_invariant:
            check_invariant_model(hf_config, "fsdp.batch_invariant")
            if self.device.type == "cuda":
                platform.switch_gpu_to_fixed_sums()
        functions = liger_functions(hf_config.model_type, self.device) if config.fsdp.layer_kernels == "liger" else None
        # Meshes, released after the model.
        param_mesh = build_param_mesh(self.dims, self.device.type, self._groups)
        self._closers.append(functools.partial(self._release, param_mesh))
        expert_mesh = build_expert_mesh(self.dims, self.device.type, self._groups) if self.dims.ep > 1 else None
        if expert_mesh is not None:
            self._closers.append(functools.partial(release_groups, expert_mesh))
        # The sharded model with its weights, and all that works on its shards.
        chunks = self._build_chunks(hf_config, param_mesh, expert_mesh, functions)
        recurrence = None if self._rows else chunks.full_model.recurrence
        cp = context_parallel_of(hf_config, self.dims, config.fsdp.context_parallel, self.mesh["cp"], recurrence)
        optimizer = self._build_optimizer(chunks, spec)
        memory = ShardedOffload(chunks, optimizer.inner if optimizer else None, config.offload_dir)
        self._gradients = grad.FSDPGradients(TiedGradients(chunks) if self.dims.pp > 1 else None, memory)
        weights = ShardedWeights(chunks)
        sync = grad.GradientSync.choose(chunks, config, self._device_memory, self.control)
        experts = fsdp_expert_info(transformer_layers(chunks.full_model))
        if config.fsdp.activation_offload:
            self._activations = ActivationOffload(self.device, self._moved)
        components = EngineComponents(
            model=chunks,
            schedule=self._schedule(chunks, sync),
            context_parallel=cp,
            optimizer=optimizer,
            checkpointer=ShardedCheckpointer(chunks, optimizer, self, self.control, config.path),
            weights=weights,
            memory=memory,
            gradients=self._gradients,
            vocab_size=chunks.full_model.vocab_size,
            max_positions=max_positions(hf_config),
            fixed_positions=learns_positions(chunks.full_model.hf),
            media_tokens=media_tokens(hf_config, images),
            images=images,
            rows=self._rows,
            token_multiple=self.dims.tp,
            routing=ExpertRouting(
                config.moe,
                experts,
                [cp],
                stages=self.dims.pp,
                why_none=why_no_router(hf_config.model_type),
            ),
            applied=self._describe(chunks, cp, param_mesh, expert_mesh) | {"gradient reduction": sync.reason},
            n_parameters=sum(parameter.numel() for parameter in chunks.full_model.parameters()),
            n_local_parameters=sum(local_part(parameter).numel() for parameter in chunks.parameters()),
        )
        # Adapters replace what trains, saves and streams the model.
        if config.lora is None:
            if self._activations is not None:
                offload_activations(chunks, self._activations, self._schedule_spec)
            return components
        adapters = AdapterSet(
            hf_config, fsdp_adapter_layout(chunks, param_mesh, self.device), config, spec, self.control
        )
        attach_fsdp_adapters(chunks, adapters)
        if self._activations is not None:
            offload_activations(chunks, self._activations, self._schedule_spec, adapters)
        return with_adapters(components, weights, adapters, self)

    def _forward_compute_mb(
        self, model: nn.Module, mb: MicroBatch, *, outputs: Outputs, hidden: Tensor | None = None
    ) -> Any:
        components = self._require_components()
        cp, temperature = components.context_parallel, self.config.temperature
        inputs = model_inputs(mb, cp, outputs, temperature, rows=self._rows, routing=components.routing)
        out = model(inputs, hidden)
        return out if isinstance(out, Tensor) else TokenOutputs(**out)

    def whole_parameters(self) -> dict[str, Tensor]:
        """Return the model's parameters by their names in transformers if this rank holds each whole, else none.

        They are the engine's own memory: others may read it while the model is not trained.
        """
        if self.dims.world_size > 1:
            return {}
        chunks = cast(ModelChunks, self._require_components().model)
        return {
            name.removeprefix("hf."): local_shard(x)[0] for name, x in chunks.stored() if isinstance(x, nn.Parameter)
        }

    def _finalize_grads(self) -> None:
        if self._gradients is not None:
            self._gradients.finalize()

    # ---- how the components are built

    def _release(self, param_mesh: DeviceMesh) -> None:
        """Release the references that this engine has to its process groups."""
        self._gradients = self._activations = None
        release_groups(param_mesh)

    def _describe(
        self, chunks: ModelChunks, cp: ContextParallel, param_mesh: DeviceMesh, expert_mesh: DeviceMesh | None
    ) -> dict[str, str]:
        """Describe what was applied, for the log."""
        config, fsdp = self.config, self.config.fsdp
        sharding = f"FSDP2, mesh {describe_mesh(param_mesh)}"
        if expert_mesh is not None:
            sharding += f", expert mesh {describe_mesh(expert_mesh)}"
        if self._rows:
            attention = f"{chunks.full_model.hf.config._attn_implementation} of transformers, one sequence per row"
        else:
            kernel = attention_kernel(chunks.full_model.hf, self.device, torch_dtype(config.dtype))
            attention = f"{kernel}, packed sequences"
        if fsdp.batch_invariant:
            attention += ", batch-invariant" if self.device.type == "cpu" else ", torch's deterministic algorithms"
        if cp.size > 1:
            attention += f", {cp.mode} over {cp.size} ranks"
        checkpointing: str = config.activation_checkpointing
        if checkpointing != "none":
            checkpointing = f"{checkpointing}, {fsdp.checkpointed_share:.0%} of the layers"
        if checkpointing.startswith("selective") and fsdp.compile:
            checkpointing += ", in compiled graphs"
        return {
            "sharding": sharding,
            "attention kernel": attention,
            "activation checkpointing": checkpointing,
            **describe_layers(config, chunks.full_model.hf.config.model_type),
            **({"activation offload": "between forward and backward"} if fsdp.activation_offload else {}),
        }

    def _schedule(self, chunks: ModelChunks, sync: grad.GradientSync) -> Schedule:
        """Build the schedule: a pipeline, or one micro-batch after the other."""
        config = self.config
        after_run = (lambda: None) if self._activations is None else self._activations.end_call
        if self.dims.pp > 1:
            dtype, split = torch_dtype(config.dtype), self.dims.cp * self.dims.tp
            return PipelineSchedule(chunks, self._schedule_spec, self.device, dtype, split, self.timer, after_run)
        model = chunks[0]
        return SequentialSchedule(
            model,
            before_backward=grad.gradient_sync_hook(model, every=sync.every),
            # A gathered weight that is kept over an optimizer step would be used again, with old values.
            after_forward=lambda: reshard(model),
            recover=lambda: _recover(model),
            timer=self.timer,
            after_run=after_run,
        )

    def _build_chunks(
        self,
        hf_config: PretrainedConfig,
        param_mesh: DeviceMesh,
        expert_mesh: DeviceMesh | None,
        functions: LayerFunctions | None,
    ) -> ModelChunks:
        """Build the sharded model of this rank with its weights: one chunk for each of its pipeline stages."""
        config = self.config
        # The full model on the meta device, cut into pipeline stages.
        full_model = self._meta_model(hf_config)
        check_experts(hf_config, full_model, self.dims)
        chunks = ModelChunks.cut(
            full_model, plan_pipeline_split(full_model, self.dims, self._schedule_spec, config.fsdp), self.mesh["pp"]
        )
        layers = transformer_layers(full_model)
        # First of all: graphs contain what layers compute, and no hook of the next steps.
        prepare_layers(chunks, config, functions, self.device)
        # Distribute each chunk. Routers are numbered over the full model.
        for stage, chunk in zip(chunks.stages, chunks, strict=True):
            if fsdp_expert_info(layers).layers:
                before = fsdp_expert_info(layers[: chunks.split.spans[stage].start]).layers
                watch_routers(transformer_layers(chunk), before)
            parallelize(chunk, param_mesh, config, expert_mesh)
            grad.time_reductions(chunk, self.timer)
        self._fill(chunks)
        chunks.train()
        return chunks

    def _fill(self, chunks: ModelChunks) -> None:
        """Allocate and fill the shards of a model on the meta device."""
        config = self.config
        device = torch.device("cpu") if config.fsdp.cpu_offload else self.device
        if config.init_from_scratch:
            init_weights(chunks, config.seed, device, self.device)
        else:
            load_weights(chunks, config.path, device, self.device)

    def _meta_model(self, hf_config: PretrainedConfig) -> PackedCausalLM:
        """Build the full model on the meta device, without values."""
        config = self.config
        # The rules of batch invariance are those of a CPU.
        invariant = config.fsdp.batch_invariant and self.device.type == "cpu"
        attention = INVARIANT_ATTENTION if invariant else PACKED_ATTENTION
        options: dict[str, Any] = {} if self._rows else {"attn_implementation": attention_by_part(hf_config, attention)}
        # The grouped matrix product does not support float64, and has no rule of batch invariance.
        if config.dtype == "float64" or invariant:
            options["experts_implementation"] = EXPERTS
        with torch.device("meta"):
            hf = model_factory(hf_config).from_config(
                # A copy: transformers writes the implementations into the configuration.
                copy.deepcopy(hf_config),
                dtype=torch_dtype(config.master_dtype),
                **options,
            )
            if not self._rows and hf.config.get_text_config()._attn_implementation != attention:
                raise ValueError(f"{type(hf).__name__} did not take the packed attention: set fsdp.attention='rows'")
            model = PackedCausalLM(
                hf,
                value_head=config.value_head,
                fp32_head=config.fp32_head,
                keep_bytes=config.kept_logits_bytes,
                own_head=self._own_head,
                invariant=invariant,
            )
            # FSDP shards parameters of one dtype.
            cast_parameters(model, torch_dtype(config.master_dtype))
            # Adapters are trained instead. Without images, no gradient reaches a vision tower.
            if config.lora is not None:
                model.requires_grad_(False)
            if config.fsdp.freeze_vision or config.fsdp.text_only:
                for part in vision_parts(hf):
                    part.requires_grad_(False)
        if model.recurrence is not None and not self._rows:
            check_whole_runs(model.recurrence, self.dims, hf_config.model_type)
            check_heads(hf, hf_config.model_type, self.dims)
            check_sharing(config.mb_spec, possible=not model.recurrence.whole_runs)
        return model

    def _build_optimizer(self, chunks: ModelChunks, spec: FinetuneSpec) -> ClippingOptimizer | None:
        """Build the optimizer of this rank's shards; ``None`` if nothing is trained."""
        config = self.config.optimizer
        named = chunks.trained()
        if config is None or not named:
            return None
        # The norm counts a tied embedding once, although two stages have it.
        copies = {id(copy) for copy in chunks.copies()}
        parameters = [parameter for _, parameter in named]
        counted = [parameter for parameter in parameters if id(parameter) not in copies]
        return ClippingOptimizer(
            self._torch_optimizer(chunks, named, config),
            config,
            spec.total_train_steps,
            global_norm=lambda: global_norm(counted, chunks.group),
            scale_grads=lambda factor: scale(parameters, factor),
        )

    def _torch_optimizer(
        self, chunks: ModelChunks, named: list[tuple[str, nn.Parameter]], config: OptimizerConfig
    ) -> torch.optim.Optimizer:
        if config.type == "muon":
            matrices = matrices_of(chunks.full_model, chunks.full_model.hf.config)
            return Muon(named, matrices, config, self.control, group_of_all_ranks(self._groups))
        names, parameters = zip(*named, strict=True)
        if self.config.fsdp.optimizer_state_dtype == "float32":
            return torch_optimizer(parameters, config)
        return BFloat16AdamW(
            parameters,
            names=names,
            **adamw_settings(config),
            seed=self.config.seed,
        )


def _recover(model: nn.Module) -> bool:
    """Reset FSDP after a failed micro-batch. Returns whether the model can be used."""
    # FSDP initializes the state in the first forward. Without it, there is nothing to reset.
    started = hasattr(model._get_fsdp_state()._comm_ctx, "post_forward_order")  # type: ignore[operator]
    if started and not reset_iter_state(model):
        return False
    # Torch keeps gradients that are not reduced yet.
    for module in model.modules():
        if isinstance(module, FSDPModule):
            grad.discard_unreduced(module)
    return True
