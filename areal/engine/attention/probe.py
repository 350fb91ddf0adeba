"""Whether a model keeps sequences apart, found by running a tiny random copy of it on the CPU.

A model's layers do what they do: they may mix neighbours without attention, drop a window that only a mask carries, or look
ahead. Names in a configuration do not tell. A copy of a few small layers of each kind does, in about a second.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from areal.engine.attention.context_parallel import ContextParallel
from areal.engine.attention.token_stream import TokenStream

LENGTHS = (9, 1, 14, 2)
"""Sequences that the probe runs; the long ones are longer than the shrunken window."""

_TOLERANCE = 1e-4
_VOCABULARY = 96
_HEADS = ("num_attention_heads", "num_key_value_heads")
_SIZES = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 48,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "head_dim": 16,
    "global_head_dim": 16,
    "q_lora_rank": 24,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 256,
    "sliding_window": 4,
    "window_size": 4,
    "attention_window": 4,
    "attention_chunk_size": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class ProbeResult:
    """What the copy showed. Each is ``None`` where all is well, and else says what is not.

    Attributes:
        packed: with sequences end to end, the numbers of each sequence alone.
        rows: with one right-padded sequence per row, the numbers of each sequence alone.
        causal: a token changes nothing before it. A model that looks ahead can be trained in no way.
    """

    packed: str | None
    rows: str | None
    causal: str | None


def probe(config: PretrainedConfig, implementation: str | None) -> ProbeResult:
    """Run a tiny random copy of the model on the CPU. Deterministic, and without effect on the caller's random state.

    Args:
        config: of a causal language model.
        implementation: a registered attention implementation that takes ``packed=AttentionLayout``; ``None`` leaves
            packing out.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        torch.manual_seed(0)
        try:
            reference = _build(shrink(config), "eager")
            sequences = [torch.randint(3, _VOCABULARY, (n,)) for n in LENGTHS]
            alone = torch.cat([_run(reference, ids[None])[0] for ids in sequences])
        except Exception as error:  # whatever a copy of an unknown model raises, nothing is known of the model then
            why = f"a tiny copy of it does not run: {_first_line(error)}"
            return ProbeResult(why, None, None)
        return ProbeResult(
            packed=_compare(alone, lambda: _packed(reference, implementation, sequences)) if implementation else None,
            rows=_compare(alone, lambda: _padded(reference, sequences)),
            causal=_compare(alone, lambda: _with_other_ends(reference, sequences, alone)),
        )


def shrink(config: PretrainedConfig) -> PretrainedConfig:
    """A copy of the configuration with small sizes and one layer of each kind (two, where layers are all alike)."""
    tiny = copy.deepcopy(config)
    for name, size in _SIZES.items():
        if isinstance(getattr(tiny, name, None), int):
            setattr(tiny, name, size)
    heads, kv_heads = (getattr(config, name, None) for name in _HEADS)
    if heads is not None:
        tiny.num_attention_heads = 4
    if kv_heads is not None:
        tiny.num_key_value_heads = 4 if kv_heads == heads else 1 if kv_heads == 1 else 2
    if hasattr(tiny, "initializer_range"):
        tiny.initializer_range = 0.2  # strong enough that a token out of place is seen far above rounding
    _keep_layers(tiny)
    return tiny


def _keep_layers(tiny: PretrainedConfig) -> None:
    n = tiny.num_hidden_layers
    per_layer = {
        name: value for name, value in vars(tiny).items() if isinstance(value, list | tuple) and len(value) == n
    }
    kinds = list(zip(*per_layer.values(), strict=True))
    keep = sorted({kinds.index(kind) for kind in kinds})
    keep = keep if len(keep) > 1 else list(range(min(2, n)))
    tiny.num_hidden_layers = len(keep)
    for name, value in per_layer.items():
        setattr(tiny, name, [value[i] for i in keep])


def _build(tiny: PretrainedConfig, implementation: str) -> PreTrainedModel:
    # The copy: building a model writes the implementation into its configuration.
    model = AutoModelForCausalLM.from_config(
        copy.deepcopy(tiny), attn_implementation=implementation, dtype=torch.float32
    )
    return model.eval()


def _run(model: PreTrainedModel, ids: Tensor, **kwargs: Any) -> Tensor:
    return model.get_decoder()(input_ids=ids, use_cache=False, **kwargs).last_hidden_state


def _packed(reference: PreTrainedModel, implementation: str, sequences: list[Tensor]) -> Tensor:
    model = _build(reference.config, implementation)
    model.load_state_dict(reference.state_dict())
    stream = TokenStream.of(LENGTHS, sum(LENGTHS))
    layout, positions = ContextParallel(None).layout(stream), stream.positions()[None]
    return _run(model, torch.cat(sequences)[None], position_ids=positions, attention_mask=None, packed=layout)[0]


def _padded(reference: PreTrainedModel, sequences: list[Tensor]) -> Tensor:
    ids = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    mask = torch.arange(ids.shape[1]) < torch.tensor(LENGTHS)[:, None]
    return _run(reference, ids, attention_mask=mask.long())[mask]


def _with_other_ends(reference: PreTrainedModel, sequences: list[Tensor], alone: Tensor) -> Tensor:
    """Outputs after the last token of each sequence became another one; at that token itself, what they were."""
    outs = []
    for ids, before in zip(sequences, alone.split(LENGTHS), strict=True):
        changed = torch.cat([ids[:-1], (ids[-1:] + 1) % _VOCABULARY])
        outs += [_run(reference, changed[None])[0, :-1], before[-1:]]
    return torch.cat(outs)


def _compare(expected: Tensor, run: Callable[[], Tensor]) -> str | None:
    try:
        error = ((run() - expected).abs().max() / expected.abs().max()).item()
    except Exception as caught:
        return _first_line(caught)
    return None if error <= _TOLERANCE else f"outputs of a tiny copy differ by {error:.1g} of their size"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
