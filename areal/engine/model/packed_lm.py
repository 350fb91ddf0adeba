"""The root module that an engine trains: a Hugging Face backbone, and the heads that turn hidden states into per-token outputs.

The heads run inside this module's forward, where FSDP has gathered their weights, so that a step never allocates ``[T, V]``
unless logits were asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel

from areal.api.batch import OutputName
from areal.engine.attention.context_parallel import AttentionLayout
from areal.engine.attention.kernels import TakeRows
from areal.engine.loss_step import split_outputs
from areal.engine.moe.routing import ROUTED_EXPERTS, Routing
from areal.utils.dtensor import local_part
from areal.utils.functional.logprobs import head_outputs, logits


@dataclass(frozen=True)
class ModelInputs:
    """What one rank feeds its model for one micro-batch. Opaque to autograd hooks: FSDP neither casts nor copies it.

    Attributes:
        input_ids, position_ids: int64 ``[T]``, this rank's tokens, padding included.
        targets: int64 ``[T]`` or ``[T, K]``; of the ``R`` tokens of ``scored``, where that is given.
        temperature: a number, or one for each of the same tokens.
        layout: how attention keeps sequences apart; ``None`` runs ``rows``.
        rows: where each packed token stands in the ``[n, S]`` grid of one sequence per row (int64 ``[T]``, and ``n``, ``S``).
        outputs: what to compute per token.
        wanted: int64, those of the same tokens of which log-probs, entropy and top-k are computed; ``None`` for all.
        scored: int64 ``[R]``, tokens that have outputs, some of them several times; ``None`` for each once.
        routing: for the routers of a model with experts.
    """

    input_ids: Tensor
    position_ids: Tensor
    targets: Tensor
    temperature: float | Tensor
    layout: AttentionLayout | None
    rows: tuple[Tensor, int, int] | None
    outputs: tuple[OutputName, ...]
    wanted: Tensor | None = None
    scored: Tensor | None = None
    routing: Routing | None = None


class PackedCausalLM(nn.Module):
    """A Hugging Face causal language model that takes packed tokens and returns per-token outputs.

    Parameters keep their Hugging Face names behind the prefix ``hf.``; a value head is ``value_head.weight`` ``[1, H]``. Where the output head
    is spread over ranks, ``vocab_group`` are these. ``has_head`` is False for a pipeline stage before the last.

    Args:
        hf: the model, on any device.
        value_head: add a value head.
        fp32_head: multiply by the head's weight in float32.
        keep_bytes: of logits that may stay for the backward; as of :func:`~areal.utils.functional.logprobs.head_outputs`.
    """

    def __init__(
        self,
        hf: PreTrainedModel,
        *,
        value_head: bool = False,
        fp32_head: bool = False,
        keep_bytes: int | None = None,
    ) -> None:
        super().__init__()
        self.hf = hf
        like = hf.get_output_embeddings().weight
        self.value_head = (
            nn.Linear(like.shape[1], 1, bias=False, device=like.device, dtype=like.dtype) if value_head else None
        )
        self._fp32_head, self._keep_bytes = fp32_head, keep_bytes
        text = hf.config.get_text_config()
        # Granite divides its logits, Cohere multiplies them, Gemma caps them: properties of the model, before any temperature.
        self._logit_scale = float(getattr(text, "logit_scale", None) or 1.0) / float(
            getattr(text, "logits_scaling", None) or 1.0
        )
        self.vocab_group: dist.ProcessGroup | None = None
        self.has_head = True
        self._softcap = getattr(text, "final_logit_softcapping", None)

    @property
    def vocab_size(self) -> int:
        """Rows of the output head."""
        return self.hf.get_output_embeddings().weight.shape[0]

    def forward(self, inputs: ModelInputs, hidden: Tensor | None = None) -> Any:
        """Outputs by name, each ``[T, ...]`` for this rank's tokens (``[R, ...]``, with ``inputs.scored``); a dict, so that FSDP finds the
        tensors in it. Of a pipeline stage before the last, its hidden states ``[1, T, H]``.

        Args:
            hidden: of the stage before, likewise.
        """
        if not self.has_head:
            states: Tensor = self._packed(inputs, hidden)
            return states.clone() if states._is_view() else states
        hidden = self._rows(inputs) if inputs.layout is None else self._packed(inputs, hidden)[0]
        head = self.hf.get_output_embeddings()
        out = token_outputs(
            hidden,
            inputs,
            lambda: local_part(head.weight),
            self.value_head,
            self._keep_bytes,
            bias=local_part(head.bias),
            logit_scale=self._logit_scale,
            softcap=self._softcap,
            fp32=self._fp32_head,
            group=self.vocab_group,
        )
        # An operation in place on a view would drop the hook that FSDP puts on what it returns.
        return pytree.tree_map(lambda x: x.clone() if x._is_view() else x, out)

    def _packed(self, inputs: ModelInputs, hidden: Tensor | None) -> Any:
        entry = {"input_ids": inputs.input_ids[None]} if hidden is None else {"inputs_embeds": hidden}
        result = self.hf.get_decoder()(
            **entry,
            position_ids=inputs.position_ids[None],
            attention_mask=None,
            use_cache=False,
            packed=inputs.layout,
            **_for_routers(inputs),
        )
        return result.last_hidden_state

    def _rows(self, inputs: ModelInputs) -> Tensor:
        if inputs.rows is None:
            raise ValueError("ModelInputs has neither an attention layout nor rows")
        where, n, width = inputs.rows
        ids = inputs.input_ids.new_zeros(n * width).index_copy(0, where, inputs.input_ids)
        mask = torch.zeros_like(ids).index_fill(0, where, 1)
        result = self.hf.get_decoder()(
            input_ids=ids.view(n, width),
            attention_mask=mask.view(n, width),
            use_cache=False,
            **_for_routers(inputs),
        )
        return result.last_hidden_state.flatten(0, 1).index_select(0, where)


def _for_routers(inputs: ModelInputs) -> dict[str, Any]:
    # Only the layers of a model whose routers are watched know this argument.
    return {} if inputs.routing is None else {"routing": inputs.routing}


def token_outputs(
    hidden: Tensor,
    inputs: ModelInputs,
    weight: Callable[[], Tensor],
    value_head: nn.Module | None,
    keep_bytes: int | None,
    **options: Any,
) -> dict[str, Any]:
    """What ``inputs.outputs`` asks for, by name, each ``[T, ...]`` or ``[R, ...]``, from the last hidden state.

    Args:
        hidden: ``[T, H]``.
        weight: gives the output head's weight ``[V, H]`` (this rank's rows of it), and is called only where an output needs it.
        value_head: ``H`` to 1, or ``None``.
        keep_bytes: of :func:`~areal.utils.functional.logprobs.head_outputs`.
        options: of :func:`~areal.utils.functional.logprobs.head_outputs` and ``logits`` alike.

    Raises:
        ValueError: values are asked of a model without a value head.
    """
    names, top = split_outputs(inputs.outputs)
    out: dict[str, Any] = {}
    if ROUTED_EXPERTS in names and inputs.routing is not None:
        out[ROUTED_EXPERTS] = _take(inputs.routing.chosen(), inputs.scored)
    hidden = _take(hidden, inputs.scored)
    if "hidden" in names:
        out["hidden"] = hidden
    if "values" in names:
        if value_head is None:
            raise ValueError("outputs has 'values', but the model has no value head: set value_head = True")
        out["values"] = value_head(hidden).squeeze(-1).to(torch.promote_types(hidden.dtype, torch.float32))
    needs_head = top is not None or bool(names & {"logits", "logprobs", "entropy"})
    if not needs_head:
        return out
    head = weight()
    if "logits" in names:
        out["logits"] = logits(hidden, head, temperature=inputs.temperature, **options)
    if top is not None or names & {"logprobs", "entropy"}:
        options |= {"entropy": "entropy" in names, "topk": top.k if top else None, "keep_bytes": keep_bytes}
        out |= _of_head(hidden, head, inputs, scored="logprobs" in names, **options)
    return out


def _take(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else TakeRows.apply(x, rows)


def _of_head(hidden: Tensor, head: Tensor, inputs: ModelInputs, *, scored: bool, **options: Any) -> dict[str, Any]:
    """Log-probs, entropy and top-k by name, 0 where they are not wanted."""
    targets, temperature = inputs.targets if scored else None, inputs.temperature
    rows, n_tokens = inputs.wanted, len(hidden)
    if rows is not None:
        hidden = hidden.index_select(0, rows)
        targets = targets.index_select(0, rows) if targets is not None else None
        temperature = temperature.index_select(0, rows) if isinstance(temperature, Tensor) else temperature
    found = head_outputs(hidden, head, targets, temperature=temperature, **options)
    given = {"logprobs": found.logprobs, "entropy": found.entropy, "topk": found.topk}
    out = {name: value for name, value in given.items() if value is not None}
    if rows is None:
        return out
    return pytree.tree_map(lambda x: x.new_zeros(n_tokens, *x.shape[1:]).index_copy(0, rows, x), out)
