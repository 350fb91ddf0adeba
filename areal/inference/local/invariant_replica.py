"""A replica whose log-probs have the bits of the trainer's: the same layers, attention and head, under the rules of batch invariance."""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from areal.engine.attention.invariant import invariant_attention
from areal.engine.attention.kernels import AttentionOptions, Segments
from areal.engine.lora.adapter_plan import head_name
from areal.engine.model.fused_layers import fuse_layers
from areal.engine.model.invariant import EXPERTS, INVARIANT_FAMILIES, check_invariant_model
from areal.utils import platform
from areal.utils.functional import logits
from areal.utils.functional.batch_invariant import batch_invariant
from areal.utils.releases import require_release

PAGED_INVARIANT = "areal_batch_invariant_paged"
"""Name of the attention over the cache of continuous batching, whose bits do not depend on the batch."""

REPLICA_FAMILIES = INVARIANT_FAMILIES - {"deepseek_v3", "gemma3_text"}
"""Model types whose answers the tests compare with the engine. The cache of windows begins in the middle of a sequence."""


def make_invariant(model: PreTrainedModel) -> None:
    """Let a replica compute with the same bits in any batch, as the FSDP engine with ``batch_invariant`` does, in place.

    On a GPU, torch's own switches are set instead; see :func:`~areal.utils.platform.switch_gpu_to_fixed_sums`.

    Raises:
        ValueError: no test shows the bits of such a model, or the installed transformers has another cache.
    """
    option = "batch_invariant"
    check_invariant_model(model.config, option, REPLICA_FAMILIES)
    require_release("transformers", (5, 23), "LocalRollout(batch_invariant=True)")
    if "sliding_attention" in (getattr(model.config, "layer_types", None) or ()):
        raise ValueError(f"{option} = True with layer_types = 'sliding_attention' in config.json: leave it out")
    if model.dtype == torch.float64:
        raise ValueError(f"{option} = True with dtype = float64: log-probs of answers are float32; load it in float32")
    if model.device.type == "cuda":
        platform.switch_gpu_to_fixed_sums()
        return
    # The layers of the engine. Experts are one product each.
    fuse_layers(model, model.config.model_type)
    if getattr(model.config, "num_experts", None):
        model.set_experts_implementation(EXPERTS)
    head: Any = model.get_output_embeddings()
    head.forward = functools.partial(_head_logits, head)
    model.forward = _under_the_rules(model.forward)  # type: ignore[method-assign]


def check_invariant_adapter(model: PreTrainedModel, layers: Collection[str]) -> None:
    """Raise if a batch-invariant replica rounds an adapter of these layers in another way than the engine.

    Raises:
        ValueError: the output head has an adapter.
    """
    if model.config._attn_implementation == PAGED_INVARIANT and head_name(model) in layers:
        raise ValueError(
            "an adapter of the output head with batch_invariant = True: its logits have other bits than the trainer's; leave one of the two out"
        )


def _head_logits(head: nn.Linear, hidden: Tensor) -> Tensor:
    """Return logits that are not rounded to 16 bits, as those of the engine."""
    return logits(hidden.flatten(0, -2), head.weight, bias=head.bias).view(*hidden.shape[:-1], -1)


def _under_the_rules(forward: Any) -> Any:
    @functools.wraps(forward)
    def run(*args: Any, **options: Any) -> Any:
        with batch_invariant():
            return forward(*args, **options)

    return run


def paged_invariant_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cache: Any = None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention with cached keys, or without a cache of right-padded sequences, with the signature that transformers calls.

    Args:
        module: the attention layer.
        query, key, value: ``[n, Hq | Hkv, S, D | Dv]``. With a cache, ``n`` is 1 and the tokens of all requests are end to end.
        attention_mask: must be ``None``.
        cache: cache of keys and values of continuous batching, or ``None``.
        scaling: factor on ``q @ k``. Defaults to ``D ** -0.5``.
        kwargs: other arguments of the model, with the lengths of the requests' queries and keys.

    Returns:
        ``[n, S, Hq, Dv]``, and ``None`` instead of attention weights.

    Raises:
        ValueError: there is a mask.
    """
    if attention_mask is not None:
        raise ValueError("attention_mask: batch-invariant attention knows sequences by their lengths; pass none")
    n, _, length, head_dim = query.shape
    lengths = keys = [length] * n
    if cache is not None:
        # The keys of each request, cached ones first.
        key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=kwargs)
        lengths, keys = (kwargs[name].diff().tolist() for name in ("cu_seq_lens_q", "cu_seq_lens_k"))
    segments = Segments.of(lengths, keys, query.device)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    options = AttentionOptions(head_dim**-0.5 if scaling is None else scaling)
    return invariant_attention(q, k, v, segments, options).unflatten(0, (n, -1)), None


AttentionInterface.register(PAGED_INVARIANT, paged_invariant_attention)
