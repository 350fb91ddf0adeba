"""Experts in the sum contract: balancing losses, replay of recorded routing, and load, alike on every engine.

A router may stand on any pipeline stage, and see any part of the tokens. So the gradient of the balancing losses is attached where the
router is, with divisors that are known before the forward, and their values are summed over the stages after the call.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from areal.api.config import MoEConfig
from areal.api.microbatch import MicroBatch
from areal.engine.attention.context_parallel import ContextParallel
from areal.engine.attention.kernels import TakeRows
from areal.engine.moe.balance_loss import AUX_LOSS, LOAD, Z_LOSS, RoutingSums, assignments, balance_loss, router_z_loss
from areal.utils.data import BatchPlan

ROUTED_EXPERTS = "routed_experts"
"""Per-token key of a batch, and output: the experts that each token goes to, ``[T, L, K]``."""

Rows = tuple[Tensor, int, int]
"""Where each packed token stands in a grid of one sequence per row (int64 ``[T]``), and the grid's rows and columns."""


@dataclass(frozen=True)
class Experts:
    """The experts of a whole model.

    Attributes:
        layers: that have experts. number: experts in each of them. per_token: experts that a token goes to.
        sigmoid: routers score experts by sigmoids, not by a softmax.
    """

    layers: int = 0
    number: int = 0
    per_token: int = 0
    sigmoid: bool = False


class Tally:
    """What the routers of this rank found in one call, by micro-batch and layer: a layer that is recomputed says the same again.

    Args:
        coefficients: of the terms that are wanted.
        scales: term -> what its sum over layers and sequences (or tokens) is multiplied by in the loss.
        statistics: count the tokens of each expert. sigmoid: of :class:`Experts`.
    """

    def __init__(
        self, coefficients: Mapping[str, float], scales: Mapping[str, float], *, statistics: bool, sigmoid: bool = False
    ) -> None:
        self._coefficients = coefficients
        self._scales = scales
        self._statistics, self._sigmoid = statistics, sigmoid
        self._found: dict[tuple[int, int], dict[str, Tensor]] = {}

    def add(self, mb: MicroBatch, layer: int, logits: Tensor, experts: Tensor) -> Tensor | None:
        """Count one layer of one micro-batch.

        Args:
            logits: of the router, ``[T, E]``; experts: int64 ``[T, K]``; both of all real tokens, in order.

        Returns:
            The balancing losses as they enter the loss, a scalar with a graph; ``None`` where there are none.
        """
        assigned = assignments(experts, logits.shape[-1])
        found: dict[str, Tensor] = {}
        if AUX_LOSS in self._coefficients:
            found[AUX_LOSS] = balance_loss(logits, assigned, mb.cu_seqlens, sigmoid=self._sigmoid)
        if Z_LOSS in self._coefficients:
            found[Z_LOSS] = router_z_loss(logits)
        total = torch.stack([self._scales[name] * value for name, value in found.items()]).sum() if found else None
        if self._statistics:
            found[LOAD] = assigned.sum(0)
        self._found[mb.index, layer] = {name: value.detach() for name, value in found.items()}
        return total

    def sums(self) -> RoutingSums:
        """The sums over this rank's layers and micro-batches, with one host read.

        Raises:
            ValueError: a balancing loss is not finite.
        """
        names = [*self._coefficients, *([LOAD] if self._statistics else [])]
        if not names or not self._found:
            return RoutingSums()
        rows = [
            torch.stack([found[name].double().sum() for found in self._found.values()]).sum()[None]
            for name in self._coefficients
        ]
        layers = sorted({layer for _, layer in self._found}) if self._statistics else []
        rows += [
            torch.stack([found[LOAD] for (_, at), found in self._found.items() if at == layer]).sum(0).double()
            for layer in layers
        ]
        numbers = iter([part.tolist() for part in torch.cat(rows).cpu().split([len(row) for row in rows])])
        terms = {name: factor * next(numbers)[0] for name, factor in self._coefficients.items()}
        for name, value in terms.items():
            if not math.isfinite(value):
                raise ValueError(f"{name} is {value}: the router's logits must be finite")
        return RoutingSums(terms, {layer: next(numbers) for layer in layers})


@dataclass(frozen=True, eq=False)
class Routing:
    """One forward of one micro-batch, as the routers of a model see it.

    Attributes:
        mb: the micro-batch. splits: how its tokens are spread over ranks, one split after the other. rows: see :data:`Rows`.
        tally: what to count in; ``None`` counts nothing.
        experts: int64 ``[T, L, K]``, where this rank's tokens must go, padding included; ``None`` leaves that to the routers.
        record: keep where tokens went.
    """

    mb: MicroBatch
    splits: tuple[ContextParallel, ...]
    rows: Rows | None
    tally: Tally | None
    experts: Tensor | None
    record: bool
    _chosen: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False)

    def replayed(self, layer: int) -> Tensor | None:
        """Where this rank's tokens must go in that layer, int64 ``[T, K]``."""
        return None if self.experts is None else self.experts[:, layer]

    def watch(self, layer: int, logits: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Count where tokens go, and attach the gradient of the balancing losses. Collective where tokens are spread over ranks.

        Args:
            layer: its number among those with experts, from 0.
            logits: of the router, ``[T, E]``. experts: int64 ``[T, K]``, where this rank's tokens go.
            weights: what the router hands to the experts: any tensor that the loss depends on.

        Returns:
            ``weights``, whose backward also gives the router its part of the balancing losses' gradient.
        """
        if self.record:
            self._chosen[layer] = experts.detach()
        if self.tally is None:
            return weights
        total = self.tally.add(self.mb, layer, self._whole(logits), self._whole(experts))
        return weights if total is None else _AddLoss.apply(weights, total)

    def chosen(self) -> Tensor:
        """Where tokens went: int64 ``[T, L, K]``, most likely first, or as they were replayed; of one context-parallel rank's tokens."""
        chosen = torch.stack([self._chosen[layer] for layer in sorted(self._chosen)], dim=1)
        if self.rows is not None:
            return chosen.index_select(0, self.rows[0])
        return _gather(chosen, self.splits[1:])

    def _whole(self, x: Tensor) -> Tensor:
        """All real tokens in order, from this rank's; the backward keeps this rank's."""
        if self.rows is not None:
            return x.index_select(0, self.rows[0])
        stream, tree = _gather(x, self.splits), self.mb.tree
        return stream[: self.mb.n_tokens] if tree is None else TakeRows.apply(stream, tree.stream_index.to(x.device))


class ExpertRouting:
    """What an engine does with the experts of its model; with a model that has none, nothing.

    Args:
        config: which terms and numbers are wanted.
        experts: of the model. stages: of its pipeline.
        splits: how tokens are spread over ranks where routers are: over context-parallel ranks, then by sequence parallelism.
        why_none: why the model counts as one without experts.

    Raises:
        ValueError: the configuration asks for something that the model has not.
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
        self._coefficients = {name: x for name, x in ((AUX_LOSS, config.aux_loss), (Z_LOSS, config.z_loss)) if x}
        self._statistics = config.statistics
        if not experts.layers and (self._coefficients or config.statistics):
            asked = next(name for name in ("aux_loss", "z_loss", "statistics") if getattr(config, name))
            raise ValueError(f"moe.{asked} = {getattr(config, asked)}, but {why_none}: leave it out")
        self._experts = experts
        self._splits = tuple(splits)
        self._stages = stages
        self._why_none = why_none
        self._tally: Tally | None = None

    def check_outputs(self, outputs: Sequence[Any]) -> None:
        """Refuse to record routing that cannot be.

        Raises:
            ValueError: says why.
        """
        if ROUTED_EXPERTS in outputs and not self._experts.layers:
            raise ValueError(f"outputs has {ROUTED_EXPERTS!r}, but {self._why_none}: leave it out")
        if ROUTED_EXPERTS in outputs and self._stages > 1:
            raise ValueError(
                f"outputs has {ROUTED_EXPERTS!r}, which no stage of a pipeline has of all layers: record it with a layout without 'p'"
            )

    def check(self, plan: BatchPlan, outputs: Sequence[Any]) -> None:
        """Refuse routing that cannot be replayed, or recorded.

        Raises:
            ValueError: names the key, what is wrong with it and the way out.
        """
        self.check_outputs(outputs)
        if ROUTED_EXPERTS in {**plan.tokens, **plan.sequences, **plan.payloads}:
            self._check_replay(plan.tokens.get(ROUTED_EXPERTS))

    def _check_replay(self, recorded: Tensor | None) -> None:
        known, what = self._experts, f"key {ROUTED_EXPERTS!r}"
        if not known.layers:
            raise ValueError(f"{what} is in the batch, but {self._why_none}: leave it out")
        shape = None if recorded is None else tuple(recorded.shape[1:])
        if recorded is None or shape != (known.layers, known.per_token):
            found = "not per-token" if shape is None else f"[B, S, {', '.join(map(str, shape))}]"
            raise ValueError(
                f"{what} is {found}: pass [B, S, {known.layers}, {known.per_token}], the {known.per_token} experts of each token in the "
                f"{known.layers} layers that have experts"
            )
        if recorded.is_floating_point() or recorded.dtype == torch.bool:
            raise ValueError(f"{what} is {recorded.dtype}: expert ids are integers")
        if not len(recorded):
            return
        low, high = recorded.min().item(), recorded.max().item()
        if low < 0 or high >= known.number:
            raise ValueError(
                f"{what} has ids from {low} to {high}: those of {known.number} experts are 0 to {known.number - 1}"
            )
        ordered = recorded.sort(-1).values
        if bool((ordered[..., 1:] == ordered[..., :-1]).any()):
            raise ValueError(
                f"{what} sends a token twice to the same expert: a token's {known.per_token} experts differ"
            )

    def with_terms(self, totals: Mapping[str, float], sequences: int, tokens: int) -> dict[str, float]:
        """The global weights of a loss, with those of the balancing losses: sequences and tokens of the global batch.

        Raises:
            ValueError: the loss has a term of the same name.
        """
        mine = {AUX_LOSS: float(sequences), Z_LOSS: float(tokens)}
        taken = sorted(self._coefficients.keys() & totals.keys())
        if taken:
            raise ValueError(
                f"loss_fn has a term {taken[0]!r}, which is that of the engine's balancing loss: give it another name"
            )
        return {**totals, **{name: mine[name] for name in self._coefficients}}

    @contextlib.contextmanager
    def counting(self, divisors: Mapping[str, float], scale: float) -> Iterator[Tally]:
        """Inside, routers add the terms to the gradient and count.

        Args:
            divisors: of the terms. scale: of the whole loss, and what the schedule's gradients are to be multiplied by.
        """
        scales = {name: factor * scale / divisors[name] for name, factor in self._coefficients.items()}
        tally = Tally(self._coefficients, scales, statistics=self._statistics, sigmoid=self._experts.sigmoid)
        self._tally = tally if self._coefficients or self._statistics else None
        try:
            yield tally
        finally:
            self._tally = None

    def of(self, mb: MicroBatch, rows: Rows | None, *, record: bool) -> Routing | None:
        """For one forward of a micro-batch; ``None`` where the model has no experts. Fillers are neither counted nor replayed."""
        if not self._experts.layers:
            return None
        replayed = mb.data[ROUTED_EXPERTS] if ROUTED_EXPERTS in mb.data and not mb.filler else None
        return Routing(
            mb=mb,
            splits=self._splits,
            rows=rows,
            tally=None if mb.filler else self._tally,
            experts=None if replayed is None else self._local(replayed, mb, rows),
            record=record,
        )

    def _local(self, recorded: Tensor, mb: MicroBatch, rows: Rows | None) -> Tensor:
        """This rank's part of ``[n_tokens, L, K]``; padding goes to the first experts."""
        length = mb.padded_length if rows is None else rows[1] * rows[2]
        padded = (
            torch.arange(self._experts.per_token, device=recorded.device).expand(length, *recorded.shape[1:]).clone()
        )
        if rows is not None:
            return padded.index_copy(0, rows[0], recorded.long())
        if mb.tree is not None:
            recorded = recorded[mb.tree.tokens.to(recorded.device)]
        padded[: len(recorded)] = recorded
        for split in self._splits:
            padded = split.shard(padded)
        return padded


def _gather(x: Tensor, splits: Sequence[ContextParallel]) -> Tensor:
    for split in reversed(splits):
        x = split.gather(x, len(x) * split.size)
    return x


def no_experts() -> ExpertRouting:
    """For a model without experts."""
    return ExpertRouting(MoEConfig(), Experts(), ())


class _AddLoss(torch.autograd.Function):
    """Passes a tensor through; whatever its gradient, that of the loss is 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss.detach()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], torch.ones_like(ctx.like)
