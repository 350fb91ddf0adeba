"""The micro-batches of a process as arrays of few different shapes: padded streams, the walk over the tree of tokens, and rows with outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from areal.api.batch import IGNORE_INDEX
from areal.api.engine import Outputs
from areal.api.microbatch import MicroBatch, PrefixTree
from areal.engine.attention.context_parallel import ContextParallel
from areal.engine.jax.model.attention import BLOCK
from areal.engine.jax.model.token_outputs import Wanted
from areal.engine.loss_step import split_outputs
from areal.engine.stream.layout import layout_of
from areal.utils.data.sequences import ROUTED_EXPERTS

_OF_WANTED_TOKENS = frozenset({"logprobs", "entropy", "topk", "topk_ids"})
"""Outputs that are 0 at tokens outside of the batch key ``output_mask``."""

_SMALLEST = 32


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is not less than ``number``."""
    return 1 << (number - 1).bit_length()


def bucket(tokens: int) -> int:
    """Return the padded length of a stream: powers of two up to a block, then at most eight an octave, in whole blocks."""
    if tokens <= BLOCK:
        return max(_SMALLEST, power_of_two(tokens))
    step = max(BLOCK, 1 << ((tokens - 1).bit_length() - 4))
    return -(-tokens // step) * step


def row_bucket(rows: int, length: int) -> int:
    """Return the padded number of rows with outputs: the length of the stream, times or divided by a power of two."""
    padded = length
    while padded % 2 == 0 and padded // 2 >= max(rows, _SMALLEST):
        padded //= 2
    while padded < rows:
        padded *= 2
    return padded


@dataclass(frozen=True)
class Sizes:
    """Sizes of one stream's micro-batch. All streams take the largest of each, and so run the same program.

    Attributes:
        tokens: of the stream.
        rows: with outputs.
        targets: targets of a row, or 0 for one without a dimension.
        slots: adapters, rounded up to a power of two.
        adapters: names of the adapters; of all streams in the largest sizes. Empty for the selected adapter.
        shared: sequences of the stream share prefixes; of any stream in the largest sizes.
        experts: layers and experts per token of recorded routing; (0, 0) without.
    """

    tokens: int
    rows: int
    targets: int
    slots: int
    adapters: frozenset[str]
    shared: bool
    experts: tuple[int, int]

    @classmethod
    def largest(cls, sizes: Sequence[Sizes]) -> Sizes:
        """Return the largest of each size, and the names of all adapters."""
        return cls(
            tokens=max(each.tokens for each in sizes),
            rows=max(each.rows for each in sizes),
            targets=max(each.targets for each in sizes),
            slots=max(each.slots for each in sizes),
            adapters=frozenset[str]().union(*(each.adapters for each in sizes)),
            shared=any(each.shared for each in sizes),
            experts=max(each.experts for each in sizes),
        )


class StreamInputs:
    """The inputs of the model for one stream of one micro-batch.

    Args:
        mb: the micro-batch.
        outputs: per-token outputs to compute.
        temperature: for all tokens, unless the batch has a per-sequence key ``temperature``.
        names: adapters of the slots; ``None`` for those of the micro-batch.

    Attributes:
        wanted: the outputs.
        adapters: runs of tokens with one adapter; ``None`` for the selected adapter.
    """

    def __init__(
        self, mb: MicroBatch, outputs: Outputs, temperature: float, names: Sequence[str] | None = None
    ) -> None:
        computed, top = split_outputs(outputs)
        self.wanted = Wanted(frozenset(computed), top.k if top else 0)
        self._mb, self._temperature = mb, temperature
        layout = layout_of(mb, ContextParallel(None), rows=False)
        self.adapters = layout.adapters
        self._names = names if names is not None else () if layout.adapters is None else layout.adapters.names
        shared = layout.shared
        # Rows of the result: one for each packed token, or with shared prefixes one for each distinct target.
        if shared is None:
            self._packed = self._place = torch.arange(mb.n_tokens)
        else:
            self._packed, self._place = shared.outputs.packed_index.cpu(), shared.outputs.local_index.cpu()
        self._n_results = len(self._packed)
        # Of a filler, routers decide.
        self._experts = None if mb.filler else mb.data.get(ROUTED_EXPERTS)
        # The head is the most expensive layer: it leaves out tokens that nobody reads.
        self._mask = None if layout.wanted is None else layout.wanted.cpu()
        self._only_mask = self._mask is not None and not computed & {"hidden", "values", "logits", ROUTED_EXPERTS}
        if self._only_mask:
            self._packed, self._place = self._packed[self._mask], self._place[self._mask]

    @property
    def sizes(self) -> Sizes:
        """Sizes of this micro-batch, unpadded."""
        targets = self._mb.data["target_ids"]
        n_stream = self._mb.n_tokens if self._mb.tree is None else len(self._mb.tree)
        n_targets = targets.shape[1] if targets.dim() == 2 else 0
        slots, shared = power_of_two(len(self._names) or 1), self._mb.tree is not None
        _, layers, per_token = (0, 0, 0) if self._experts is None else self._experts.shape
        names = frozenset(self._names)
        return Sizes(n_stream, len(self._packed), n_targets, slots, names, shared, (layers, per_token))

    def arrays(self, sizes: Sizes, dtype: np.dtype, parts: int = 1, block: int = BLOCK) -> dict[str, np.ndarray]:
        """Return the arrays of the stream, padded to ``sizes``, for a stream divided into ``parts``; temperatures are of ``dtype``.

        Attention is computed in blocks of ``block`` tokens.
        """
        mb = self._mb
        # Every part has the length of a stream, and as many rows as the others.
        part = bucket(-(-sizes.tokens // parts))
        length = parts * part
        n_rows = parts * row_bucket(-(-sizes.rows // parts), part)
        ids = mb.data["input_ids"].cpu()
        ids = ids if mb.tree is None else ids[mb.tree.tokens]
        targets = _columns(mb.data["target_ids"].cpu()[self._packed].numpy(), sizes.targets)
        temperature = np.full(len(self._packed), self._temperature)
        if "temperature" in mb.data:
            per_token = mb.data["temperature"].cpu().repeat_interleave(torch.tensor(mb.seqlens))
            temperature = per_token[self._packed].double().numpy()
        return {
            "ids": _padded(ids.numpy(), length, 0, np.int32),
            **walk(mb.seqlens, mb.tree, length, min(part, block)),
            "places": _padded(self._place.numpy(), n_rows, 0, np.int32),
            "targets": _padded(targets, n_rows, IGNORE_INDEX, np.int32),
            "temperature": _padded(temperature, n_rows, 1.0, dtype),
            # One adapter needs no slots.
            **({"slots": self._slots(length)} if sizes.slots > 1 else {}),
            **({"experts": self._replayed(length, sizes.experts)} if any(sizes.experts) else {}),
        }

    def _slots(self, length: int) -> np.ndarray:
        """Return the slot of each token's adapter: its index in the names of the slots."""
        if self.adapters is None:
            return np.zeros(length, np.int32)
        names, lengths = zip(*self.adapters.layers, strict=True)
        of_rows = np.repeat([self._names.index(name) for name in names], lengths)
        return _padded(of_rows[:length], length, 0, np.int32)

    def _replayed(self, length: int, shape: tuple[int, int]) -> np.ndarray:
        """Return the experts that tokens are sent to, ``[length, L, K]``; -1 where the router decides, as of padding."""
        tree, recorded = self._mb.tree, torch.empty(0, *shape) if self._experts is None else self._experts.cpu()
        if self._experts is not None and tree is not None:
            recorded = recorded[tree.tokens]
        return _padded(recorded.numpy(), length, -1, np.int32)

    def result(self, name: str, rows: Tensor) -> Tensor:
        """Return an output of all rows ``[n, ...]`` from the computed ones, which are padded. Differentiable."""
        rows = rows[: len(self._packed)]
        # Another stream may have more targets for each token.
        if name == "logprobs" and rows.dim() == 2:
            n_targets = self.sizes.targets
            rows = rows[:, :n_targets] if n_targets else rows[:, 0]
        if self._mask is None or name not in _OF_WANTED_TOKENS:
            return rows
        mask = self._mask.to(rows.device)
        kept = rows if self._only_mask else rows.index_select(0, mask)
        return kept.new_zeros(self._n_results, *kept.shape[1:]).index_copy(0, mask, kept)


def empty_stream(other: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the arrays of a stream without sequences, of the sizes of another one: padding, whose outputs nobody reads."""
    length = len(other["ids"])
    empty = {name: np.zeros_like(values) for name, values in other.items()}
    empty |= walk((), None, length, length // len(other["first"]))
    empty["targets"][:] = IGNORE_INDEX
    empty["temperature"][:] = 1.0
    if "experts" in empty:
        empty["experts"][:] = -1
    return empty


def walk(seqlens: Sequence[int], tree: PrefixTree | None, length: int, block: int) -> dict[str, np.ndarray]:
    """Return the fields of :class:`~areal.engine.jax.model.attention.Visibility`, padded to a length, for blocks of a size.

    Padding sees itself only.
    """
    places = np.arange(length, dtype=np.int32)
    leave, positions, root = places + 1, np.zeros(length, np.int32), places.copy()
    if tree is None:
        starts = np.cumsum([0, *seqlens])
        total = int(starts[-1])
        leave[:total] = np.repeat(starts[1:], seqlens)
        root[:total] = np.repeat(starts[:-1], seqlens)
        positions[:total] = places[:total] - root[:total]
    else:
        _walk_tree(tree, leave, positions, root)
    first = root.reshape(-1, block).min(1) // block
    return {"leave": leave, "positions": positions, "first": first.astype(np.int32)}


def _walk_tree(tree: PrefixTree, leave: np.ndarray, positions: np.ndarray, root: np.ndarray) -> None:
    """Write the walk over a tree. Each branch begins after a token of an earlier one, or has a root."""
    contexts = [context.numpy() for context in tree.context_index.split(list(tree.context_lengths))]
    starts = np.cumsum([0, *tree.lengths])
    # Tokens of the branches that begin after each token. Their numbers are complete when its own branch is reached.
    below = np.zeros(len(tree), np.int64)
    for start, n, context in reversed(list(zip(starts, tree.lengths, contexts, strict=False))):
        branch = slice(start, start + n)
        sizes = (1 + below[branch])[::-1].cumsum()[::-1]
        leave[branch] += (sizes - 1).astype(np.int32)
        positions[branch] = np.arange(len(context) - n, len(context))
        root[branch] = context[0]
        if len(context) > n:
            below[context[-n - 1]] += sizes[0]


def _columns(targets: np.ndarray, n: int) -> np.ndarray:
    """Return targets ``[R]`` or ``[R, K]`` as ``[R, n]``; for ``n = 0`` as they are."""
    if n == 0:
        return targets
    columns = targets.reshape(len(targets), -1)
    return np.pad(columns, ((0, 0), (0, n - columns.shape[1])), constant_values=IGNORE_INDEX)


def _padded(values: np.ndarray, length: int, filling: float, dtype: np.dtype | type) -> np.ndarray:
    out = np.full((length, *values.shape[1:]), filling, dtype)
    out[: len(values)] = values
    return out


class LocalStreams:
    """The inputs of one process for one micro-batch.

    Args:
        mb: the micro-batch.
        outputs, temperature: as for :class:`~areal.engine.jax.inputs.StreamInputs`.
        n: int. Streams that the devices of the process compute. Those without sequences are padding.

    Attributes:
        wanted: outputs to compute.
        adapters: runs of tokens with one adapter; ``None`` for the selected adapter.
    """

    def __init__(self, mb: MicroBatch, outputs: Outputs, temperature: float, n: int) -> None:
        self._n = n
        self.adapters = layout_of(mb, ContextParallel(None), rows=False).adapters
        # All streams of a process have the same factors, and so the same slots.
        names = () if self.adapters is None else self.adapters.names
        self._inputs = [StreamInputs(stream, outputs, temperature, names) for stream in mb.streams or (mb,)]
        self.wanted = self._inputs[0].wanted

    @property
    def sizes(self) -> Sizes:
        """Largest sizes of the streams, unpadded."""
        return Sizes.largest([inputs.sizes for inputs in self._inputs])

    def arrays(self, sizes: Sizes, dtype: np.dtype, parts: int = 1, block: int = BLOCK) -> dict[str, np.ndarray]:
        """Return the arrays of all streams, ``[S, ...]``; see :meth:`~areal.engine.jax.inputs.StreamInputs.arrays`."""
        streams = [inputs.arrays(sizes, dtype, parts, block) for inputs in self._inputs]
        streams += [empty_stream(streams[0])] * (self._n - len(streams))
        return {name: np.stack([stream[name] for stream in streams]) for name in streams[0]}

    def result(self, name: str, rows: Tensor) -> Tensor:
        """Return an output of the micro-batch ``[n, ...]`` from the computed rows ``[S, R, ...]``. Differentiable."""
        results = [inputs.result(name, rows[k]) for k, inputs in enumerate(self._inputs)]
        return results[0] if len(results) == 1 else torch.cat(results)
