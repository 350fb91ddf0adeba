"""Probe of a model: run a tiny random copy on the CPU, and test whether it keeps packed sequences apart.

A configuration does not show whether layers mix neighbouring tokens without attention, need a window that only a mask
contains, or see later tokens. A copy with one small layer of each kind shows it, in about a second.
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
"""Lengths of the sequences that the probe runs. The long ones exceed the reduced sliding window."""

_TOLERANCE = 1e-4  # relative; rounding of float32 stays far below, a leaked token far above
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
    """Result of a probe. Each field is ``None`` if the check passed, else a description of the difference.

    Attributes:
        packed: sequences packed end to end have the same outputs as each sequence by itself.
        rows: right-padded sequences, one per row, have the same outputs as each sequence by itself.
        causal: a token does not change the outputs of earlier tokens. A model that fails this check cannot be trained.
    """

    packed: str | None
    rows: str | None
    causal: str | None


def probe(config: PretrainedConfig, implementation: str | None) -> ProbeResult:
    """Run a tiny random copy of the model on the CPU. Deterministic, and without effect on the caller's random state.

    Args:
        config: configuration of a causal language model.
        implementation: name of a registered attention implementation that takes ``packed=AttentionLayout``. ``None``: packing
            is not checked.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        torch.manual_seed(0)
        try:
            # The reference: each sequence by itself, with the eager attention of transformers.
            reference = _build(shrink(config), "eager")
            sequences = [torch.randint(3, _VOCABULARY, (n,)) for n in LENGTHS]
            alone = torch.cat([_run(reference, ids[None])[0] for ids in sequences])
        except Exception as error:  # an unknown model may raise anything; the probe then knows nothing about it
            why = f"a tiny copy of it does not run: {_first_line(error)}"
            return ProbeResult(why, None, None)
        return ProbeResult(
            packed=_compare(alone, lambda: _packed(reference, implementation, sequences)) if implementation else None,
            rows=_compare(alone, lambda: _padded(reference, sequences)),
            causal=_compare(alone, lambda: _with_other_ends(reference, sequences, alone)),
        )


def shrink(config: PretrainedConfig) -> PretrainedConfig:
    """Return a copy of a configuration with small sizes and one layer of each kind (two, if all layers are equal)."""
    tiny = copy.deepcopy(config)
    # Reduce every size that the configuration has.
    for name, size in _SIZES.items():
        if isinstance(getattr(tiny, name, None), int):
            setattr(tiny, name, size)
    # Four query heads; key heads keep their kind: as many, grouped, or a single one.
    heads, kv_heads = (getattr(config, name, None) for name in _HEADS)
    if heads is not None:
        tiny.num_attention_heads = 4
    if kv_heads is not None:
        tiny.num_key_value_heads = 4 if kv_heads == heads else 1 if kv_heads == 1 else 2
    if hasattr(tiny, "initializer_range"):
        tiny.initializer_range = 0.2  # large weights: one wrong token must change outputs far more than rounding does
    _keep_layers(tiny)
    return tiny


def _keep_layers(tiny: PretrainedConfig) -> None:
    """Reduce a configuration to one layer of each kind, where a kind is a combination of all per-layer settings."""
    n = tiny.num_hidden_layers
    # Settings with one entry for each layer, such as layer_types.
    per_layer = {
        name: value for name, value in vars(tiny).items() if isinstance(value, list | tuple) and len(value) == n
    }
    # The first layer of each kind, at least two layers in all.
    kinds = list(zip(*per_layer.values(), strict=True))
    keep = sorted({kinds.index(kind) for kind in kinds})
    keep = keep if len(keep) > 1 else list(range(min(2, n)))
    tiny.num_hidden_layers = len(keep)
    for name, value in per_layer.items():
        setattr(tiny, name, [value[i] for i in keep])


def _build(tiny: PretrainedConfig, implementation: str) -> PreTrainedModel:
    # A copy of the configuration, because building a model writes the attention implementation into it.
    model = AutoModelForCausalLM.from_config(
        copy.deepcopy(tiny), attn_implementation=implementation, dtype=torch.float32
    )
    return model.eval()


def _run(model: PreTrainedModel, ids: Tensor, **kwargs: Any) -> Tensor:
    return model.get_decoder()(input_ids=ids, use_cache=False, **kwargs).last_hidden_state


def _packed(reference: PreTrainedModel, implementation: str, sequences: list[Tensor]) -> Tensor:
    """Return the outputs of all sequences packed end to end, with the same weights."""
    model = _build(reference.config, implementation)
    model.load_state_dict(reference.state_dict())
    stream = TokenStream.of(LENGTHS, sum(LENGTHS))
    layout, positions = ContextParallel(None).layout(stream), stream.positions()[None]
    return _run(model, torch.cat(sequences)[None], position_ids=positions, attention_mask=None, packed=layout)[0]


def _padded(reference: PreTrainedModel, sequences: list[Tensor]) -> Tensor:
    """Return the outputs of the real tokens of right-padded sequences, one per row."""
    ids = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    mask = torch.arange(ids.shape[1]) < torch.tensor(LENGTHS)[:, None]
    return _run(reference, ids, attention_mask=mask.long())[mask]


def _with_other_ends(reference: PreTrainedModel, sequences: list[Tensor], alone: Tensor) -> Tensor:
    """Return the outputs of sequences whose last token is replaced; at the last token itself, the original outputs."""
    outs = []
    for ids, before in zip(sequences, alone.split(LENGTHS), strict=True):
        changed = torch.cat([ids[:-1], (ids[-1:] + 1) % _VOCABULARY])
        outs += [_run(reference, changed[None])[0, :-1], before[-1:]]
    return torch.cat(outs)


def _compare(expected: Tensor, run: Callable[[], Tensor]) -> str | None:
    """Return ``None`` if ``run`` computes the expected outputs, else its error or the size of the difference."""
    try:
        error = ((run() - expected).abs().max() / expected.abs().max()).item()
    except Exception as caught:
        return _first_line(caught)
    return None if error <= _TOLERANCE else f"outputs of a tiny copy differ by {error:.1g} of their size"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
