"""The Megatron-Core engine on the meta device: its own code, without values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from areal.api import MicroBatchList, TrainEngineConfig
from areal.engine.megatron.engine import MegatronEngine
from areal.engine.megatron.model.packed_gpt import PackedGPT
from areal.engine.megatron.offload import expected_optimizer_bytes
from areal.engine.megatron.optimizer.chained import distributed
from areal.engine.megatron.optimizer.main_parameters import present_optimizers
from areal.engine.megatron.weights import MegatronWeights
from areal.plan.engines.planned_step import NotPlannedError, PlannedStep, without_update
from areal.plan.step_recorder import StepRecorder
from areal.utils.offload import expected_state_bytes, storage_bytes


class PlannedMegatronEngine(PlannedStep, MegatronEngine):
    """A Megatron-Core engine in :func:`~areal.plan.planned_world.planned_world`, with Megatron-Core's local layers.

    Args:
        config: configuration of the engine. The weights at ``path`` are not read.
        memory: bytes of a rank's device.
    """

    def __init__(self, config: TrainEngineConfig, memory: int) -> None:
        if config.optimizer is not None and config.optimizer.type == "muon":
            # The parts of matrices in the buffers of other ranks are not known.
            way_out = f"plan 'adamw', or the backend fsdp, instead of {config.backend}"
            raise NotPlannedError("optimizer.type", "muon", way_out)
        super().__init__(config, memory)
        self._chained: Any = None

    def _build_chunks(self, hf: PretrainedConfig, megatron: Any, groups: Any) -> list[PackedGPT]:
        with torch.device("meta"):
            chunks = super()._build_chunks(hf, megatron, groups)
        for chunk in chunks:
            for module in chunk.modules():
                dispatcher: Any = getattr(module, "token_dispatcher", None)
                if dispatcher is not None:
                    dispatcher.preprocess = functools.partial(_spread_tokens, dispatcher, dispatcher.preprocess)
        return chunks

    def _fill(self, weights: MegatronWeights, optimizer: Any) -> None:
        self._chained = optimizer
        for inner in present_optimizers(optimizer):
            without_update(inner.optimizer)

    @property
    def chunks(self) -> list[Any]:
        """The model chunks of this rank."""
        return list(self._require_components().model)  # type: ignore[call-overload]

    @property
    def head_rows(self) -> int:
        has_head = any(chunk.module.post_process for chunk in self.chunks)
        return -(-self._require_components().vocab_size // self.dims.tp) if has_head else 0

    @property
    def experts_per_token(self) -> int:
        return self.chunks[0].config.moe_router_topk or 0

    def warm_up(self, mbs: MicroBatchList) -> None:
        """Do nothing: the first step has the same collectives as later ones, at other times."""

    def watch(self, recorder: StepRecorder) -> None:
        recorder.ignore([*self._parameters(), *(buffer.grad_data for buffer in self._buffers())])
        recorder.watch(nn.ModuleList(self.chunks), self.factors)

    def held_bytes(self) -> dict[str, int]:
        # Gradients have buffers for as long as the engine lives.
        return {
            "parameters": storage_bytes(self._parameters()),
            "gradients": storage_bytes(buffer.grad_data for buffer in self._buffers()),
            "optimizer": self._optimizer_bytes(),
        }

    def update_bytes(self) -> int:
        state = self._optimizer_bytes()
        if not state:
            return 0
        # AdamW reads gradients, and reads and writes parameters and state.
        if self.factors:
            return 3 * storage_bytes(self.factors) + 2 * state
        shards = distributed(self.config)
        return 2 * state + sum(
            buffer.numel
            * (buffer.grad_dtype.itemsize + 2 * buffer.param_dtype.itemsize)
            // (buffer.data_parallel_world_size if shards else 1)
            for buffer in self._buffers()
        )

    def _optimizer_bytes(self) -> int:
        adapter: Any = self._adapter
        if adapter is None:
            return expected_optimizer_bytes(self._chained)
        return 0 if adapter.optimizer is None else expected_state_bytes(adapter.optimizer.inner)

    def _parameters(self) -> list[Any]:
        return [*(parameter for chunk in self.chunks for parameter in chunk.parameters()), *self.factors]

    def _buffers(self) -> list[Any]:
        return [buffer for chunk in self.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]


def _spread_tokens(dispatcher: Any, count: Callable[[Tensor], Tensor], routing_map: Tensor) -> Tensor:
    """Return the number of tokens of each local expert, with equally many for every expert, in place of a dispatcher's ``preprocess``.

    The host reads these numbers and those of the exchanges, which have no values in a plan.

    Args:
        dispatcher: Megatron-Core's dispatcher of tokens.
        count: its own function, whose collectives a plan counts.
        routing_map: bool ``[T, E]``. Experts of each token.
    """
    count(routing_map)
    copies, experts, ep, tp = dispatcher.num_out_tokens, dispatcher.num_experts, dispatcher.ep_size, dispatcher.tp_size
    sent = torch.tensor([copies // experts + (expert < copies % experts) for expert in range(experts)], device="cpu")
    received = sent[dispatcher.local_expert_indices]
    # Every rank sends as many copies to an expert as this one.
    if ep > 1 or tp > 1:
        dispatcher.input_splits = sent.view(ep, -1).sum(1)
        dispatcher.output_splits = received.sum().repeat(ep)
        dispatcher.output_splits_tp = (ep * received.sum()).repeat(tp)
    if dispatcher.num_local_experts > 1:
        dispatcher.num_global_tokens_per_local_expert = received.repeat(tp * ep, 1)
    return received * tp * ep
