"""The root module of an engine: a Hugging Face backbone, with heads that turn hidden states into per-token outputs.

The heads run inside this module's forward, while FSDP has their weights gathered. So a step allocates ``[T, V]`` only if
logits are requested.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel

from areal.api.batch import IGNORE_INDEX, OutputName
from areal.api.engine import Outputs
from areal.api.microbatch import MicroBatch
from areal.engine.attention.context_parallel import AttentionLayout, ContextParallel
from areal.engine.attention.kernels import TakeRows
from areal.engine.loss_step import split_outputs
from areal.engine.model.classifier import make_value_head
from areal.engine.model.heads import Head, LinearHead, OwnHead, UpdateFn, decoder_of, head_of_runs, no_update
from areal.engine.model.vision import LocalImages, decoder_inputs
from areal.engine.moe.routing import ExpertRouting, Routing
from areal.engine.recurrence.functions import replace_functions, running
from areal.engine.recurrence.rows import run_in_rows
from areal.engine.stream.layout import AdapterRuns, layout_of, pad_rows
from areal.utils.data.sequences import ROUTED_EXPERTS
from areal.utils.dtensor import local_part
from areal.utils.functional.batch_invariant import batch_invariant


@dataclass(frozen=True)
class ModelInputs:
    """Inputs of one rank's model for one micro-batch. Opaque to FSDP, which casts and copies only tensors that it finds.

    Attributes:
        input_ids, position_ids: int64 ``[T]``. This rank's tokens, padding included.
        targets: int64 ``[T]`` or ``[T, K]``; with ``output_rows``, ``[R]`` or ``[R, K]``.
        temperature: number, or float ``[T]`` (``[R]``).
        layout: layout of packed attention. ``None`` for one sequence per row, see ``rows``.
        rows: int64 ``[T]``, ``n`` and ``S``: the index of each packed token in an ``[n, S]`` grid of one sequence per row.
        outputs: per-token outputs to compute.
        wanted: int64. Indices of the tokens (rows) with log-probs, entropy and top-k; ``None`` for all.
        output_rows: int64 ``[R]``. Tokens with outputs, which may repeat; ``None`` for every token once.
        routing: state of the routers, for a model with experts.
        adapters: runs of tokens with one adapter; ``None`` for the selected adapter.
        images: images of the micro-batch; ``None`` for a model of text. If they have positions, ``position_ids`` are int64 ``[T, 3]``.
    """

    input_ids: Tensor
    position_ids: Tensor
    targets: Tensor
    temperature: float | Tensor
    layout: AttentionLayout | None
    rows: tuple[Tensor, int, int] | None
    outputs: tuple[OutputName, ...]
    wanted: Tensor | None = None
    output_rows: Tensor | None = None
    routing: Routing | None = None
    adapters: AdapterRuns | None = None
    images: LocalImages | None = None


class PackedCausalLM(nn.Module):
    """A Hugging Face causal language model that takes packed tokens and returns per-token outputs.

    Parameters keep their Hugging Face names after the prefix ``hf.``; a value head is ``value_head.weight`` ``[1, H]``, with a bias for a
    classifier of tokens.

    Args:
        hf: the model, on any device.
        value_head: whether to add a value head.
        fp32_head: whether to multiply by the head's weight in float32.
        keep_bytes: memory for logits that are kept for the backward; see :func:`~areal.utils.functional.logprobs.head_outputs`.
        invariant: compute with the same bits in any batch; see :mod:`areal.utils.functional.batch_invariant`.
        own_head: compute logits by the model's own code after its decoder, for models whose logits are more than a product
            with a weight.

    Attributes:
        vocab_group: ranks that the output head is sharded over, or ``None``.
        has_head: False for a pipeline stage before the last.
        head_update: function that returns the low-rank update of the output head by an adapter, or ``None`` without one.
        invariant: whether its bits do not depend on the batch.
        recurrence: what recurrent layers of the model need of a stream; ``None`` for a model without them.
    """

    def __init__(
        self,
        hf: PreTrainedModel,
        *,
        value_head: bool = False,
        fp32_head: bool = False,
        keep_bytes: int | None = None,
        own_head: bool = False,
        invariant: bool = False,
    ) -> None:
        super().__init__()
        self.hf = hf
        self.recurrence = replace_functions(hf) or run_in_rows(hf)
        self._own_head = OwnHead(hf) if own_head else None
        like, width = hf.get_output_embeddings().weight, hf.config.get_text_config().hidden_size
        self.value_head = make_value_head(hf.config, width, like) if value_head else None
        self._fp32_head, self._keep_bytes = fp32_head, keep_bytes
        self.invariant = invariant
        text = hf.config.get_text_config()
        # Granite divides its logits, Cohere multiplies them, Gemma caps them. These belong to the model and come before the
        # temperature.
        self._logit_scale = float(getattr(text, "logit_scale", None) or 1.0) / float(
            getattr(text, "logits_scaling", None) or 1.0
        )
        self.vocab_group: dist.ProcessGroup | None = None
        self.has_head = True
        self.head_update: UpdateFn = no_update
        self._softcap = getattr(text, "final_logit_softcapping", None)

    @property
    def head_is_linear(self) -> bool:
        """Whether logits are the product with the head's weight, instead of computed by the model's own code."""
        return self._own_head is None

    @property
    def vocab_size(self) -> int:
        """Number of logits of a token."""
        rows: int = self.hf.get_output_embeddings().weight.shape[0]
        return rows if self._own_head is None else self._own_head.vocab_size(rows)

    def forward(self, inputs: ModelInputs, hidden: Tensor | None = None) -> Any:
        """Run :meth:`_run`, with the same bits in any batch if that was asked for."""
        with batch_invariant() if self.invariant else nullcontext():
            return self._run(inputs, hidden)

    def _run(self, inputs: ModelInputs, hidden: Tensor | None) -> Any:
        """Return outputs by name, each ``[T, ...]`` for this rank's tokens (``[R, ...]`` with ``inputs.output_rows``).

        A pipeline stage before the last returns its hidden states ``[1, T, H]`` instead.

        Args:
            inputs: this rank's slice of the micro-batch.
            hidden: ``[1, T, H]``. Hidden states of the previous pipeline stage; ``None`` on the first stage.
        """
        # A stage without the head passes its hidden states on. (FSDP's hooks need a tensor that is not a view.)
        if not self.has_head:
            states: Tensor = self._run_packed(inputs, hidden)
            return states.clone() if states._is_view() else states

        # The backbone, packed or with one sequence per row.
        hidden = self._run_rows(inputs) if inputs.layout is None else self._run_packed(inputs, hidden)[0]

        # The heads. The result is a dict, so that FSDP finds the tensors in it.
        out = token_outputs(hidden, inputs, self._own_head or self._linear_head(inputs.adapters), self.value_head)
        # An in-place operation on a view would drop the backward hook that FSDP registers on the outputs.
        return pytree.tree_map(lambda x: x.clone() if x._is_view() else x, out)

    def _linear_head(self, adapters: AdapterRuns | None) -> Head:
        """Return the head that multiplies by this rank's rows of the gathered weight."""
        head = self.hf.get_output_embeddings()
        make = functools.partial(
            LinearHead,
            lambda: local_part(head.weight),
            keep_bytes=self._keep_bytes,
            bias=local_part(getattr(head, "bias", None)),
            logit_scale=self._logit_scale,
            softcap=self._softcap,
            fp32=self._fp32_head,
            group=self.vocab_group,
            scale_logits=self.invariant,
        )
        return head_of_runs(make, self.head_update, adapters)

    def _run_packed(self, inputs: ModelInputs, hidden: Tensor | None) -> Any:
        """Run the backbone on all sequences end to end, ``[1, T]``."""
        # A later pipeline stage starts from hidden states instead of token ids.
        entry = {"input_ids": inputs.input_ids[None]} if hidden is None else {"inputs_embeds": hidden}
        positions = inputs.position_ids[None]
        if inputs.images is not None:
            entry = decoder_inputs(self.hf, inputs.input_ids, inputs.images, self.vocab_group)
            positions = positions if inputs.position_ids.dim() == 1 else inputs.position_ids.T[:, None]
        with nullcontext() if self.recurrence is None else running(inputs.layout):
            result = decoder_of(self.hf)(
                **entry,
                position_ids=positions,
                attention_mask=None,
                use_cache=False,
                packed=inputs.layout,
                **_for_routers(inputs),
            )
        return result.last_hidden_state

    def _run_rows(self, inputs: ModelInputs) -> Tensor:
        """Run the backbone on one right-padded sequence per row, and return packed hidden states ``[T, H]``."""
        if inputs.rows is None:
            raise ValueError("ModelInputs has neither an attention layout nor rows")
        # Scatter packed tokens into the grid, with a mask over the real ones.
        grid_index, n, width = inputs.rows
        ids = inputs.input_ids.new_zeros(n * width).index_copy(0, grid_index, inputs.input_ids)
        mask = torch.zeros_like(ids).index_fill(0, grid_index, 1)
        result = decoder_of(self.hf)(
            input_ids=ids.view(n, width),
            attention_mask=mask.view(n, width),
            use_cache=False,
            **_for_routers(inputs),
        )
        # Pack again, so that everything after the backbone is independent of how it ran.
        return result.last_hidden_state.flatten(0, 1).index_select(0, grid_index)


def _for_routers(inputs: ModelInputs) -> dict[str, Any]:
    # Only models whose routers are observed accept this argument.
    return {} if inputs.routing is None else {"routing": inputs.routing}


def token_outputs(hidden: Tensor, inputs: ModelInputs, head: Head, value_head: nn.Module | None) -> dict[str, Any]:
    """Compute the outputs that ``inputs.outputs`` names, each ``[T, ...]`` or ``[R, ...]``, from the last hidden state.

    Args:
        hidden: ``[T, H]``. Last hidden state.
        inputs: inputs of the forward.
        head: output head. It is called only if an output needs it.
        value_head: linear layer from ``H`` to 1, or ``None``.

    Raises:
        ValueError: values are requested from a model without a value head.
    """
    names, top = split_outputs(inputs.outputs)
    out: dict[str, Any] = {}
    # With shared prefixes, a token has one row for each distinct target: select rows before the heads.
    if ROUTED_EXPERTS in names and inputs.routing is not None:
        out[ROUTED_EXPERTS] = _select_rows(inputs.routing.chosen(), inputs.output_rows)
    hidden = _select_rows(hidden, inputs.output_rows)

    # Outputs that do not need the output head.
    if "hidden" in names:
        out["hidden"] = hidden
    if "values" in names:
        if value_head is None:
            raise ValueError("outputs has 'values', but the model has no value head: set value_head = True")
        out["values"] = value_head(hidden).squeeze(-1).to(torch.promote_types(hidden.dtype, torch.float32))

    # Outputs of the head. Only "logits" allocates [T, V].
    if "logits" in names:
        out["logits"] = head.logits(hidden, inputs.temperature)
    if top is not None or names & {"logprobs", "entropy"}:
        options = {"entropy": "entropy" in names, "topk": top.k if top else None}
        out |= _wanted_head_outputs(hidden, head, inputs, logprobs="logprobs" in names, **options)
    return out


def _select_rows(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else TakeRows.apply(x, rows)


def _wanted_head_outputs(
    hidden: Tensor, head: Head, inputs: ModelInputs, *, logprobs: bool, **options: Any
) -> dict[str, Any]:
    """Return log-probs, entropy and top-k by name, with 0 at tokens that are not in ``inputs.wanted``."""
    targets, temperature = inputs.targets if logprobs else None, inputs.temperature
    rows, n_tokens = inputs.wanted, len(hidden)
    # Leave unwanted tokens out before the head, which is the most expensive layer per token.
    if rows is not None:
        hidden = hidden.index_select(0, rows)
        targets = targets.index_select(0, rows) if targets is not None else None
        temperature = temperature.index_select(0, rows) if isinstance(temperature, Tensor) else temperature
    result = head.outputs(hidden, targets, temperature=temperature, **options)
    by_name = {"logprobs": result.logprobs, "entropy": result.entropy, "topk": result.topk}
    out = {name: value for name, value in by_name.items() if value is not None}
    if rows is None:
        return out
    # Scatter back to all tokens.
    return pytree.tree_map(lambda x: x.new_zeros(n_tokens, *x.shape[1:]).index_copy(0, rows, x), out)


def model_inputs(
    mb: MicroBatch,
    cp: ContextParallel,
    outputs: Outputs,
    temperature: float,
    *,
    rows: bool,
    routing: ExpertRouting | None = None,
) -> ModelInputs:
    """Return this rank's slice of a micro-batch, padded to ``mb.padded_length``.

    Args:
        mb: the micro-batch.
        cp: the ranks that the token stream is split over.
        outputs: per-token outputs to compute.
        temperature: for all tokens, unless the batch has a per-sequence key ``temperature``.
        rows: run one sequence per row instead of packed.
        routing: expert routing of the engine, if its model may have experts.
    """
    # Index tensors were copied to the device with the batch: a copy here would wait for the previous micro-batch.
    layout, length = layout_of(mb, cp, rows=rows), mb.padded_length
    shared = layout.shared

    def for_outputs(x: Tensor, padding: float) -> Tensor:
        """Select from a packed key ``[T, ...]`` the values of this rank's output rows."""
        return cp.shard(pad_rows(x, length, padding)) if shared is None else x[shared.outputs.packed_index]

    def of_stream(x: Tensor, padding: float) -> Tensor:
        """Select from a packed key ``[T, ...]`` the values of this rank's tokens: with shared prefixes, each common token once."""
        return cp.shard(pad_rows(x if shared is None else x[shared.tokens], length, padding))

    images = None if mb.images is None else LocalImages(mb.images, of_stream(mb.images.rows, -1))
    positions = None if mb.images is None else mb.images.positions
    # Targets and positions were computed from complete sequences. Only now the stream is sliced over ranks.
    return ModelInputs(
        input_ids=of_stream(mb.data["input_ids"], 0),
        position_ids=layout.positions if positions is None else of_stream(positions, 0),
        targets=for_outputs(mb.data["target_ids"], IGNORE_INDEX),
        temperature=for_outputs(_per_token(mb, "temperature"), 1.0) if "temperature" in mb.data else temperature,
        layout=layout.attention(cp),
        rows=layout.rows,
        outputs=outputs,
        wanted=layout.wanted,
        output_rows=None if shared is None else shared.outputs.local_index,
        routing=routing.of(mb, layout, record=ROUTED_EXPERTS in outputs) if routing else None,
        adapters=layout.adapters,
        images=images,
    )


def _per_token(mb: MicroBatch, key: str) -> Tensor:
    """Expand a per-sequence key ``[n]`` to the packed tokens, ``[T]``."""
    # The output size is known on the host; without it, repeat_interleave would wait for the device.
    return mb.data[key].repeat_interleave(mb.cu_seqlens.diff(), output_size=mb.n_tokens)
