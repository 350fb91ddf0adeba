"""Output heads: the product with a weight that most models have, the head that a model computes by its own code; the decoder before it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from areal.api import IGNORE_INDEX, TopKOutput
from areal.engine.model.hub import max_positions
from areal.engine.stream.layout import AdapterRuns, Runs
from areal.utils.functional import HeadUpdate
from areal.utils.functional.logprobs import HeadOutputs, default_keep_bytes, head_outputs, logits

_CHUNK_TOKENS = 1024


UpdateFn = Callable[[str | None], HeadUpdate | None]
"""Returns the low-rank update of a head by an adapter, or by the selected adapter for ``None``; ``None`` without one."""


def no_update(adapter: str | None) -> None:
    """Return no update of the head: a model without adapters."""


class Head(Protocol):
    """An output head."""

    def logits(self, hidden: Tensor, temperature: float | Tensor) -> Tensor:
        """Return logits ``[T, V]`` of hidden states ``[T, H]``, divided by the temperature."""

    def outputs(
        self,
        hidden: Tensor,
        targets: Tensor | None,
        *,
        temperature: float | Tensor,
        entropy: bool,
        topk: int | None,
    ) -> HeadOutputs:
        """Return per-token outputs of hidden states; see :func:`~areal.utils.functional.logprobs.head_outputs`."""


class LinearHead:
    """A head that multiplies by a weight.

    Args:
        weight: function that returns the weight, ``[V, H]`` (this rank's rows). It is called only if an output needs the head.
        keep_bytes: see :func:`~areal.utils.functional.logprobs.head_outputs`.
        fraction: fraction of these bytes that this head may keep.
        scale_logits: see :func:`~areal.utils.functional.logprobs.head_outputs`.
        options: arguments of both :func:`~areal.utils.functional.logprobs.head_outputs` and ``logits``.
    """

    def __init__(
        self,
        weight: Callable[[], Tensor],
        *,
        keep_bytes: int | None,
        fraction: float = 1.0,
        scale_logits: bool = False,
        **options: Any,
    ) -> None:
        self._weight, self._keep_bytes, self._fraction, self._options = weight, keep_bytes, fraction, options
        self._scale_logits = scale_logits

    def logits(self, hidden: Tensor, temperature: float | Tensor) -> Tensor:
        return logits(hidden, self._weight(), temperature=temperature, **self._options)

    def outputs(self, hidden: Tensor, targets: Tensor | None, **requested: Any) -> HeadOutputs:
        keep = self._keep_bytes
        if self._fraction < 1.0:
            keep = int(self._fraction * (default_keep_bytes(hidden.device) if keep is None else keep))
        requested |= {"keep_bytes": keep, "scale_logits": self._scale_logits}
        return head_outputs(hidden, self._weight(), targets, **requested, **self._options)


class HeadOfRuns:
    """A head for rows of several adapters: each run of rows has a separate head.

    So each run is computed as in a call with its adapter alone.

    Args:
        logits: heads of all rows, and the number of rows of each.
        outputs: heads of the wanted rows, and the number of rows of each.
    """

    def __init__(self, logits: Sequence[tuple[LinearHead, int]], outputs: Sequence[tuple[LinearHead, int]]) -> None:
        self._logits, self._outputs = logits, outputs

    def logits(self, hidden: Tensor, temperature: float | Tensor) -> Tensor:
        parts = self._parts(self._logits, hidden, temperature)
        return torch.cat([head.logits(*part) for head, *part in parts])

    def outputs(
        self, hidden: Tensor, targets: Tensor | None, *, temperature: float | Tensor, **requested: Any
    ) -> HeadOutputs:
        parts = self._parts(self._outputs, hidden, targets, temperature)
        results = [head.outputs(x, ids, temperature=scale, **requested) for head, x, ids, scale in parts]
        return HeadOutputs(
            _joined([result.logprobs for result in results]),
            _joined([result.entropy for result in results]),
            None
            if results[0].topk is None
            else TopKOutput(*(torch.cat(x) for x in zip(*(result.topk for result in results), strict=True))),
        )

    @staticmethod
    def _parts(heads: Sequence[tuple[LinearHead, int]], *values: Any) -> Iterator[tuple[Any, ...]]:
        """Yield each head with its rows of tensors; other values are the same for all."""
        lengths = [length for _, length in heads]
        columns = [x.split(lengths) if isinstance(x, Tensor) else [x] * len(heads) for x in values]
        yield from zip((head for head, _ in heads), *columns, strict=True)


def head_of_runs(make: Callable[..., LinearHead], update_of: UpdateFn, runs: AdapterRuns | None) -> Head:
    """Return the head of the selected adapter, or of runs of rows with different adapters.

    Args:
        make: returns a head, from ``update`` and ``fraction``.
        update_of: returns the update of the head by an adapter.
        runs: runs of rows; ``None`` for the selected adapter.
    """
    if runs is None:
        return make(update=update_of(None))

    def heads(rows: Runs) -> list[tuple[LinearHead, int]]:
        # Neighbours without an update have one head.
        merged: list[tuple[HeadUpdate | None, int]] = []
        for name, length in rows:
            update = update_of(name)
            if merged and merged[-1][0] is update is None:
                length += merged.pop()[1]
            merged.append((update, length))
        total = sum(length for _, length in merged)
        return [(make(update=update, fraction=length / total), length) for update, length in merged]

    logits, outputs = heads(runs.outputs), heads(runs.wanted)
    # No row is wanted: an empty tensor has the right outputs with any head.
    if len(logits) <= 1 and len(outputs) <= 1:
        return (logits or outputs)[0][0]
    return HeadOfRuns(logits, outputs or [(make(update=None), 0)])


def _joined(tensors: Sequence[Tensor | None]) -> Tensor | None:
    present = [x for x in tensors if x is not None]
    return torch.cat(present) if present else None


class OwnHead:
    """The head of a model as its own forward computes it: everything after the decoder.

    Chunks of hidden states replace the output of the decoder, and the model's forward computes their logits. The backward
    recomputes them, so that the logits of one chunk exist at a time.

    Args:
        hf: the model.
    """

    def __init__(self, hf: PreTrainedModel) -> None:
        self._hf = hf

    @torch.no_grad()
    def vocab_size(self, rows: int) -> int:
        """Return the number of logits of a token, which may be fewer than the ``rows`` of the weight."""
        like = self._hf.get_output_embeddings().weight
        width = self._hf.config.get_text_config().hidden_size
        return min(rows, self.logits(like.new_zeros(1, width), 1.0).shape[1])

    def logits(self, hidden: Tensor, temperature: float | Tensor) -> Tensor:
        # The ids are those of no token: the decoder, which would read them, is replaced.
        ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        result = _DecoderOutput(last_hidden_state=hidden[None])
        with replaced_decoder(self._hf, lambda *args, **options: result):
            z = self._hf(input_ids=ids, use_cache=False).logits[0]
        z = z.to(torch.promote_types(z.dtype, torch.float32))
        scale = temperature.detach().unsqueeze(1) if isinstance(temperature, Tensor) else temperature
        return z / scale

    def outputs(
        self,
        hidden: Tensor,
        targets: Tensor | None,
        *,
        temperature: float | Tensor,
        entropy: bool,
        topk: int | None,
    ) -> HeadOutputs:
        # Without tokens, a dummy token takes part: all ranks must use the same parameters.
        n_tokens, dummies = len(hidden), max(0, 1 - len(hidden))
        hidden = torch.cat([hidden, hidden.new_zeros(dummies, hidden.shape[1])])
        if targets is not None:
            targets = torch.cat([targets, targets.new_full((dummies, *targets.shape[1:]), IGNORE_INDEX)])
        if not isinstance(temperature, Tensor):
            temperature = hidden.new_full(
                (len(hidden),), temperature, dtype=torch.promote_types(hidden.dtype, torch.float32)
            )
        scale = torch.cat([temperature, temperature.new_ones(len(hidden) - len(temperature))]).detach()

        # Chunk by chunk; the backward computes the logits of a chunk again.
        chunks = []
        for start in range(0, len(hidden), _CHUNK_TOKENS):
            rows = slice(start, start + _CHUNK_TOKENS)
            picked = None if targets is None else targets[rows]
            chunks.append(
                checkpoint(self._chunk, hidden[rows], picked, scale[rows], entropy, topk, use_reentrant=False)
            )
        logprobs, entropies, best, best_ids = (
            torch.cat(tensors)[:n_tokens] if tensors[0] is not None else None for tensors in zip(*chunks, strict=True)
        )
        most_likely = None if best is None or best_ids is None else TopKOutput(best, best_ids)
        return HeadOutputs(logprobs, entropies, most_likely)

    def _chunk(
        self, hidden: Tensor, targets: Tensor | None, temperature: Tensor, entropy: bool, topk: int | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Return log-probs, entropy, top-k and their ids of a chunk of tokens."""
        logp = self.logits(hidden, temperature).log_softmax(-1)
        best = logp.topk(topk, dim=-1) if topk else (None, None)
        entropies = -(logp.exp() * logp).sum(-1) if entropy else None
        if targets is None:
            return None, entropies, *best
        # A target outside the vocabulary gets NaN, as in the linear head.
        known = (targets >= 0) & (targets < logp.shape[1])
        ids = targets.masked_fill(~known, 0).view(len(logp), -1)
        picked = logp.gather(1, ids).view(targets.shape)
        picked = picked.masked_fill(~known, torch.nan).masked_fill(targets == IGNORE_INDEX, 0.0)
        return picked, entropies, *best


class _DecoderOutput(BaseModelOutputWithPastAndCrossAttentions):
    """The output of a decoder that has only hidden states. Everything else that a model may read is ``None``."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


@contextlib.contextmanager
def replaced_decoder(hf: PreTrainedModel, forward: Callable[..., Any]) -> Iterator[None]:
    """Context in which the decoder of a model computes another function than its forward."""
    decoder = decoder_of(hf)
    outer = vars(decoder).get("forward")
    decoder.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        del decoder.forward
        if outer is not None:
            decoder.forward = outer  # type: ignore[method-assign]


def decoder_of(hf: PreTrainedModel) -> PreTrainedModel:
    """Return the decoder of a causal language model.

    Raises:
        ValueError: no module of the model is its decoder.
    """
    # Some families answer get_decoder() with their output layer, or with themselves.
    for module in (hf.get_decoder(), hf.base_model, *hf.children()):
        if isinstance(module, PreTrainedModel) and module is not hf:
            return module
    raise ValueError(f"{type(hf).__name__} has no module that is its decoder, so that it cannot be trained")


def learns_positions(hf: PreTrainedModel) -> bool:
    """Return whether a decoder looks up positions in a table of learned ones, as GPT-2 and OPT do."""
    tokens, positions = hf.get_input_embeddings(), max_positions(hf.config)
    return any(
        isinstance(module, nn.Embedding)
        and module is not tokens
        and module.num_embeddings - getattr(module, "offset", 0) == positions
        for module in decoder_of(hf).modules()
    )


def decoder_layers(hf: PreTrainedModel) -> list[nn.Module]:
    """Return the layers of a transformers model's decoder; none if there is no list of layers. Layers inside of layers are left out."""
    # The classes that transformers declares as layers, or else the longest list of modules.
    decoder, names = decoder_of(hf), set(getattr(hf, "_no_split_modules", None) or ())
    layers = list(dict.fromkeys(_outermost(decoder, names)))
    return layers or max(
        (list(module) for module in decoder.modules() if isinstance(module, nn.ModuleList)), key=len, default=[]
    )


def _outermost(module: nn.Module, classes: set[str]) -> Iterator[nn.Module]:
    """Yield the modules of these classes that are inside of no other such module."""
    for child in module.children():
        if type(child).__name__ in classes:
            yield child
        else:
            yield from _outermost(child, classes)
