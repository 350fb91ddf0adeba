"""Expert routing: balancing losses as sums, replay of recorded routing, and load of the experts, on every engine.

A router may be on any pipeline stage and see only some of the tokens. So the gradient of the balancing losses is attached at
the router, with divisors that are known before the forward. Their values are summed over stages after the call.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from areal.api.microbatch import MicroBatch
from areal.api.sections.experts import MoEConfig
from areal.engine.attention.context_parallel import ContextParallel
from areal.engine.attention.kernels import TakeRows
from areal.engine.batch_rules import Experts, RoutingRules
from areal.engine.moe.balance_loss import AUX_LOSS, LOAD, Z_LOSS, RoutingSums, assignments, balance_loss, router_z_loss
from areal.engine.stream.layout import StreamLayout
from areal.utils.data.sequences import ROUTED_EXPERTS


class Tally:
    """Balancing losses and expert load of this rank's routers in one call.

    Entries are keyed by micro-batch and layer, so that a recomputed layer overwrites its entry instead of adding to it.

    Args:
        coefficients: term -> coefficient, for the terms that are configured.
        scales: term -> factor of its sum (over layers, and sequences or tokens) in the loss.
        statistics: whether to count the tokens of each expert.
        sigmoid: see :class:`Experts`.
    """

    def __init__(
        self, coefficients: Mapping[str, float], scales: Mapping[str, float], *, statistics: bool, sigmoid: bool = False
    ) -> None:
        self._coefficients = coefficients
        self._scales = scales
        self._statistics, self._sigmoid = statistics, sigmoid
        self._values: dict[tuple[int, int], dict[str, Tensor]] = {}

    def add(self, mb: MicroBatch, layer: int, logits: Tensor, experts: Tensor) -> Tensor | None:
        """Record one layer of one micro-batch.

        Args:
            mb: the micro-batch.
            layer: index of the layer among those with experts.
            logits: ``[T, E]``. Logits of the router for all real tokens, in order.
            experts: int64 ``[T, K]``. Experts of the same tokens.

        Returns:
            The sum of the balancing losses, scaled as in the loss: a scalar with a graph. ``None`` without such losses.
        """
        assigned = assignments(experts, logits.shape[-1])
        # Undivided sums over the sequences (or tokens) of this micro-batch.
        values: dict[str, Tensor] = {}
        if AUX_LOSS in self._coefficients:
            values[AUX_LOSS] = balance_loss(logits, assigned, mb.cu_seqlens, sigmoid=self._sigmoid)
        if Z_LOSS in self._coefficients:
            values[Z_LOSS] = router_z_loss(logits)
        total = torch.stack([self._scales[name] * value for name, value in values.items()]).sum() if values else None
        # Load is a number only: it enters no loss.
        if self._statistics:
            values[LOAD] = assigned.sum(0)
        self._values[mb.index, layer] = {name: value.detach() for name, value in values.items()}
        return total

    def sums(self) -> RoutingSums:
        """Return the sums over this rank's layers and micro-batches. Reads the device once.

        Raises:
            ValueError: a balancing loss is not finite.
        """
        names = [*self._coefficients, *([LOAD] if self._statistics else [])]
        if not names or not self._values:
            return RoutingSums()
        # One row [1] for each term, summed over everything.
        rows = [
            torch.stack([values[name].double().sum() for values in self._values.values()]).sum()[None]
            for name in self._coefficients
        ]
        # One row [E] for each layer: tokens of each expert, summed over micro-batches.
        layers = sorted({layer for _, layer in self._values}) if self._statistics else []
        rows += [
            torch.stack([values[LOAD] for (_, at), values in self._values.items() if at == layer]).sum(0).double()
            for layer in layers
        ]
        # Copy all rows to the host at once, then take them apart again.
        numbers = iter([row.tolist() for row in torch.cat(rows).cpu().split([len(row) for row in rows])])
        terms = {name: factor * next(numbers)[0] for name, factor in self._coefficients.items()}
        for name, value in terms.items():
            if not math.isfinite(value):
                raise ValueError(f"{name} is {value}: the router's logits must be finite")
        return RoutingSums(terms, {layer: next(numbers) for layer in layers})


@dataclass(frozen=True, eq=False)
class Routing:
    """State that the routers of a model use during one forward of one micro-batch.

    Attributes:
        mb: the micro-batch.
        splits: splits of its tokens over ranks, applied one after the other.
        layout: index tensors of the micro-batch, on its device.
        tally: the call's tally; ``None`` to record nothing.
        experts: int64 ``[T, L, K]``, padding included. Experts that this rank's tokens are sent to; rows of -1, or ``None`` for all,
            where the routers decide.
        record: whether to keep the experts of each token as an output.
    """

    mb: MicroBatch
    splits: tuple[ContextParallel, ...]
    layout: StreamLayout
    tally: Tally | None
    experts: Tensor | None
    record: bool
    _chosen: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False)

    def replayed(self, layer: int, own: Tensor) -> Tensor:
        """Return the experts of this rank's tokens in a layer, int64 ``[T, K]``: those to replay, or the router's ``own``."""
        if self.experts is None:
            return own
        experts = self.experts[:, layer]
        return torch.where(experts < 0, own, experts)

    def watch(self, layer: int, logits: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Record the routing of a layer, and attach the gradient of the balancing losses. Collective if tokens are split.

        Args:
            layer: index of the layer among those with experts, from 0.
            logits: ``[T, E]``. Logits of the router.
            experts: int64 ``[T, K]``. Experts that this rank's tokens are sent to.
            weights: tensor that the router passes to the experts. Any tensor will do that the loss depends on.

        Returns:
            ``weights``, whose backward also computes the gradient of the balancing losses for the router.
        """
        if self.record:
            self._chosen[layer] = experts.detach()
        if self.tally is None:
            return weights
        # The losses are means over complete sequences, so that they need the tokens of all ranks.
        total = self.tally.add(self.mb, layer, self._all_tokens(logits), self._all_tokens(experts))
        return weights if total is None else _AddLoss.apply(weights, total)

    def chosen(self) -> Tensor:
        """Return the experts of one context-parallel rank's tokens, int64 ``[T, L, K]``, most likely first or as replayed."""
        chosen = torch.stack([self._chosen[layer] for layer in sorted(self._chosen)], dim=1)
        if self.layout.rows is not None:
            return chosen.index_select(0, self.layout.rows[0])
        # The first split is context parallelism, over which outputs are gathered later.
        return _gather(chosen, self.splits[1:])

    def _all_tokens(self, x: Tensor) -> Tensor:
        """Gather all real tokens in packed order. The backward keeps the gradient of this rank's tokens."""
        if self.layout.rows is not None:
            return x.index_select(0, self.layout.rows[0])
        stream, shared = _gather(x, self.splits), self.layout.shared
        # A shared token counts once for each sequence that contains it, as without sharing.
        return stream[: self.mb.n_tokens] if shared is None else TakeRows.apply(stream, shared.stream_index)


class ExpertRouting:
    """Expert routing of one engine. Does nothing for a model without experts.

    Args:
        config: balancing losses and statistics to compute.
        experts: experts of the model.
        splits: splits of the tokens at the routers: over context-parallel ranks, then by sequence parallelism.
        stages: number of pipeline stages.
        why_none: reason why the model counts as one without experts, for error messages.

    Attributes:
        rules: rules for recorded routing.

    Raises:
        ValueError: the configuration needs experts, and the model is without.
    """

    def __init__(
        self,
        config: MoEConfig,
        experts: Experts,
        splits: Sequence[ContextParallel],
        *,
        stages: int = 1,
        why_none: str = "the model has no experts",
    ) -> None:
        # Terms with a coefficient of 0 are not computed.
        self._coefficients = {name: x for name, x in ((AUX_LOSS, config.aux_loss), (Z_LOSS, config.z_loss)) if x}
        self._statistics = config.statistics
        if not experts.layers and (self._coefficients or config.statistics):
            asked = next(name for name in ("aux_loss", "z_loss", "statistics") if getattr(config, name))
            raise ValueError(f"moe.{asked} = {getattr(config, asked)}, but {why_none}: leave it out")
        self._experts = experts
        self._splits = tuple(splits)
        self.rules = RoutingRules(experts, stages, why_none)
        self._tally: Tally | None = None

    def close(self) -> None:
        """Release the process groups over which tokens are split."""
        self._splits, self._tally = (), None

    def with_terms(self, totals: Mapping[str, float], sequences: int, tokens: int) -> dict[str, float]:
        """Return the global weights of a loss, with the weights of the balancing losses added.

        Args:
            totals: term -> global weight.
            sequences, tokens: numbers of the global batch, the weights of the auxiliary loss and the z-loss.

        Raises:
            ValueError: the loss already has a term of the same name.
        """
        weights = {AUX_LOSS: float(sequences), Z_LOSS: float(tokens)}
        taken = sorted(self._coefficients.keys() & totals.keys())
        if taken:
            raise ValueError(
                f"loss_fn has a term {taken[0]!r}, which is that of the engine's balancing loss: give it another name"
            )
        return {**totals, **{name: weights[name] for name in self._coefficients}}

    @contextlib.contextmanager
    def counting(self, divisors: Mapping[str, float], scale: float) -> Iterator[Tally]:
        """Return a context in which routers record into a new tally and add the balancing losses to the gradient.

        Args:
            divisors: term -> divisor.
            scale: factor of the loss, times the factor that the schedule's gradients need.
        """
        # The gradient leaves the router before the sums are known: every factor must be known in advance.
        scales = {name: factor * scale / divisors[name] for name, factor in self._coefficients.items()}
        tally = Tally(self._coefficients, scales, statistics=self._statistics, sigmoid=self._experts.sigmoid)
        self._tally = tally if self._coefficients or self._statistics else None
        try:
            yield tally
        finally:
            self._tally = None

    def of(self, mb: MicroBatch, layout: StreamLayout, *, record: bool) -> Routing | None:
        """Return the routing of one forward of a micro-batch; ``None`` for a model without experts.

        Fillers are neither recorded nor replayed.
        """
        if not self._experts.layers:
            return None
        # A filler is without recorded routing, and must not change a loss or a count.
        replayed = mb.data[ROUTED_EXPERTS] if ROUTED_EXPERTS in mb.data and not mb.filler else None
        return Routing(
            mb=mb,
            splits=self._splits,
            layout=layout,
            tally=None if mb.filler else self._tally,
            experts=None if replayed is None else self._local(replayed, mb, layout),
            record=record,
        )

    def _local(self, recorded: Tensor, mb: MicroBatch, layout: StreamLayout) -> Tensor:
        """Slice recorded routing ``[n_tokens, L, K]`` for this rank. Of padding, routers decide."""
        rows, shared = layout.rows, layout.shared
        length = mb.padded_length if rows is None else rows[1] * rows[2]
        padded = recorded.new_full((length, *recorded.shape[1:]), -1, dtype=torch.int64)
        if rows is not None:
            return padded.index_copy(0, rows[0], recorded.long())
        # Packed tokens to tokens of the stream, then to this rank's slice of it.
        if shared is not None:
            recorded = recorded[shared.tokens]
        padded[: len(recorded)] = recorded
        for split in self._splits:
            padded = split.shard(padded)
        return padded


def _gather(x: Tensor, splits: Sequence[ContextParallel]) -> Tensor:
    """Undo splits in reverse order. Collective."""
    for split in reversed(splits):
        x = split.gather(x, len(x) * split.size)
    return x


def no_experts() -> ExpertRouting:
    """Return the routing of a model without experts."""
    return ExpertRouting(MoEConfig(), Experts(), ())


class _AddLoss(torch.autograd.Function):
    """Identity on ``x`` whose backward also starts the backward of ``loss``, with gradient 1.

    So the balancing losses enter the gradient on the rank of the router, although the loss is computed on the last stage.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss.detach()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], torch.ones_like(ctx.like)
