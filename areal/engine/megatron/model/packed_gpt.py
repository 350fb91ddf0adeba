"""One chunk of a Megatron-Core model: takes packed tokens, and returns a hidden state or per-token outputs."""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from transformers import PretrainedConfig

from areal.engine.megatron.model.layer_spec import PackedLayout, block_spec
from areal.engine.megatron.model.rotary import RotaryAngles
from areal.engine.model.classifier import make_value_head
from areal.engine.model.heads import LinearHead, UpdateFn, head_of_runs, no_update
from areal.engine.model.hub import layer_windows
from areal.engine.model.packed_lm import ModelInputs, token_outputs


class PackedGPT(GPTModel):
    """A model chunk: consecutive layers, the embedding before the first layer, and the heads after the last.

    Args:
        hf: configuration of the Hugging Face model.
        config: Megatron-Core's configuration.
        groups: process groups of the layout.
        vp_stage: index of this chunk on its rank, or ``None`` if a rank has one chunk.
        value_head: add a value head ``value_head.weight`` ``[1, H]`` after the last layer, with a bias for a classifier of tokens.
        fp32_head: multiply by the head's weight in float32.
        keep_bytes: size of the logits that may be kept for the backward, see
            :func:`~areal.utils.functional.logprobs.head_outputs`.
        adapted: the model gets adapters and is not trained itself.

    Attributes:
        head_update: function that returns the low-rank update of the output head by an adapter, or ``None`` without one.
    """

    def __init__(
        self,
        hf: PretrainedConfig,
        config: TransformerConfig,
        groups: ProcessGroupCollection,
        *,
        vp_stage: int | None,
        value_head: bool,
        fp32_head: bool,
        keep_bytes: int | None,
        adapted: bool = False,
    ) -> None:
        stage, stages, chunks = groups.pp.rank(), groups.pp.size(), config.virtual_pipeline_model_parallel_size or 1
        chunk = vp_stage or 0
        tp = groups.tp.size()
        # Positions are rotary and come from the layout; the vocabulary is padded to a multiple of the
        # tensor-parallel size.
        super().__init__(
            config,
            block_spec(config, layer_windows(hf), pp_rank=stage, vp_stage=vp_stage, local=adapted),
            vocab_size=-(-hf.vocab_size // tp) * tp,
            max_sequence_length=hf.max_position_embeddings,
            pre_process=stage == 0 and chunk == 0,
            post_process=stage == stages - 1 and chunk == chunks - 1,
            share_embeddings_and_output_weights=hf.tie_word_embeddings,
            position_embedding_type="none",
            pg_collection=groups,
            vp_stage=vp_stage,
        )
        self.rotary = RotaryAngles(hf, config.kv_channels)
        self._latent = config.multi_latent_attention
        self.value_head: nn.Linear | None = None
        if value_head and self.post_process:
            self.value_head = make_value_head(hf, config.hidden_size, self.decoder.final_layernorm.weight)
        self._real_vocab = hf.vocab_size
        self._padding_id = hf.pad_token_id
        self._fp32_head, self._keep_bytes = fp32_head, keep_bytes
        self.head_update: UpdateFn = no_update
        self._adapted = adapted
        if adapted:
            self.requires_grad_(False)

    def _head_weight(self) -> Tensor:
        """Return this rank's rows of the output head, without padding."""
        for gather in self.output_layer._forward_pre_hooks.values():
            gather(self.output_layer, ())  # the module itself is never called, and its weight may still be gathering
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        # At least one row is kept on a rank with padding only, so that it takes part in collectives.
        start = self.pg_collection.tp.rank() * len(weight)
        return weight[: max(1, min(len(weight), self._real_vocab - start))]

    def forward(self, inputs: ModelInputs) -> Any:  # type: ignore[override]
        """Return the hidden state ``[T, 1, H]``, or after the last layer outputs by name.

        Outputs are ``[T, ...]`` for this rank's tokens.
        """
        embedded = self._embed(inputs) if self.pre_process else None
        if self._adapted and embedded is not None and torch.is_grad_enabled():
            embedded.requires_grad_()  # recomputation in Megatron-Core gives gradients only if an input requires one
        # Latent attention takes angles from the layout instead of rotary_pos_emb.
        angles = self.rotary(inputs.position_ids)
        hidden = self.decoder(
            hidden_states=embedded,
            attention_mask=None,
            rotary_pos_emb=None if self._latent else angles,
            packed_seq_params=PackedLayout(
                qkv_format="sbhd",
                layout=inputs.layout,
                angles=(angles.squeeze(1), self.rotary.scaling),
                routing=inputs.routing,
                adapters=inputs.adapters,
            ),
        )
        return self._outputs(hidden, inputs) if self.post_process else hidden

    def _embed(self, inputs: ModelInputs) -> Tensor:
        embedded = self.embedding(input_ids=inputs.input_ids[None], position_ids=inputs.position_ids[None])
        if self._padding_id is None:
            return embedded
        # Hugging Face embeddings do not give a gradient to the padding row.
        is_padding = inputs.input_ids == self._padding_id
        if self.config.sequence_parallel:
            is_padding = is_padding.chunk(self.pg_collection.tp.size())[self.pg_collection.tp.rank()]
        return torch.where(is_padding[:, None, None], embedded.detach(), embedded)

    def _outputs(self, hidden: Tensor, inputs: ModelInputs) -> dict[str, Any]:
        if self.config.sequence_parallel:
            # Every rank computes the same losses from the full sequence, so that its slice of the gradient is
            # already complete.
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        make = functools.partial(
            LinearHead,
            self._head_weight,
            keep_bytes=self._keep_bytes,
            fp32=self._fp32_head,
            group=self.pg_collection.tp if self.pg_collection.tp.size() > 1 else None,
        )
        head = head_of_runs(make, self.head_update, inputs.adapters)
        return token_outputs(hidden.squeeze(1), inputs, head, self.value_head)
