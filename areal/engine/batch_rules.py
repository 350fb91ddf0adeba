"""The checks of a batch: an engine makes them on each rank, and the driver of a group before it sends anything; also of recorded routing."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from areal.api.engine import BatchInput, Outputs, TrainEngine
from areal.api.loss import Normalization
from areal.api.sections.microbatch import MicroBatchSpec
from areal.engine.loss_step import check_outputs
from areal.utils.data import ADAPTER, BatchPlan, plan_batch
from areal.utils.data.images import ImageRules
from areal.utils.data.sequences import ROUTED_EXPERTS

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Experts:
    """The experts of a full model, over all pipeline stages.

    Attributes:
        layers: number of layers with experts.
        number: number of experts in each of these layers.
        per_token: number of experts that a token is sent to.
        sigmoid: whether routers score experts by sigmoids instead of a softmax.
    """

    layers: int = 0
    number: int = 0
    per_token: int = 0
    sigmoid: bool = False


@dataclass(frozen=True)
class RoutingRules:
    """Rules of an engine for recorded routing: in a batch, where it is replayed, and as an output.

    Attributes:
        experts: experts of the model.
        stages: number of pipeline stages.
        why_none: reason why the model counts as one without experts, for error messages.
    """

    experts: Experts
    stages: int
    why_none: str

    def check_outputs(self, outputs: Sequence[Any]) -> None:
        """Raise if routing is to be recorded, and cannot be.

        Raises:
            ValueError: the model is without experts, or its layers are on several pipeline stages.
        """
        if ROUTED_EXPERTS in outputs and not self.experts.layers:
            raise ValueError(f"outputs has {ROUTED_EXPERTS!r}, but {self.why_none}: leave it out")
        if ROUTED_EXPERTS in outputs and self.stages > 1:
            raise ValueError(
                f"outputs has {ROUTED_EXPERTS!r}, which no stage of a pipeline has of all layers: record it with a layout without 'p'"
            )

    def check(self, plan: BatchPlan) -> None:
        """Raise if the routing in a batch cannot be replayed.

        Raises:
            ValueError: names the key, the problem and the way out.
        """
        if ROUTED_EXPERTS in {**plan.tokens, **plan.sequences, **plan.payloads}:
            self._check_replay(plan.tokens.get(ROUTED_EXPERTS))

    def _check_replay(self, recorded: Tensor | None) -> None:
        """Raise unless recorded routing is ``[T, L, K]`` of distinct, valid expert ids, or -1 where the router decides."""
        known, what = self.experts, f"key {ROUTED_EXPERTS!r}"
        if not known.layers:
            raise ValueError(f"{what} is in the batch, but {self.why_none}: leave it out")
        # Shape and dtype.
        shape = None if recorded is None else tuple(recorded.shape[1:])
        if recorded is None or shape != (known.layers, known.per_token):
            actual = "not per-token" if shape is None else f"[B, S, {', '.join(map(str, shape))}]"
            raise ValueError(
                f"{what} is {actual}: pass [B, S, {known.layers}, {known.per_token}], the {known.per_token} experts of each token in the "
                f"{known.layers} layers that have experts"
            )
        if recorded.is_floating_point() or recorded.dtype == torch.bool:
            raise ValueError(f"{what} is {recorded.dtype}: expert ids are integers")
        # Values: ids of the model's experts, and no expert twice for one token.
        recorded = recorded[(recorded != -1).any(-1)]
        if not len(recorded):
            return
        low, high = recorded.min().item(), recorded.max().item()
        if low < 0 or high >= known.number:
            raise ValueError(
                f"{what} has ids from {low} to {high}: those of {known.number} experts are 0 to {known.number - 1}, and -1 for all of a token "
                "that has no record"
            )
        ordered = recorded.sort(-1).values
        if bool((ordered[..., 1:] == ordered[..., :-1]).any()):
            raise ValueError(
                f"{what} sends a token twice to the same expert: a token's {known.per_token} experts differ"
            )


@dataclass(frozen=True)
class BatchRules:
    """Rules of an engine for a batch and the outputs of a call. They pickle, and are equal on all ranks.

    Attributes:
        spec: budget and granularity of micro-batches.
        align: divisor of the padded length of a micro-batch.
        vocab_size: upper bound of token ids.
        value_head: True if the model has a value head.
        routing: rules for the recorded routing of experts.
        adapters: True if the engine has adapters, which samples may name.
        media_tokens: token ids that stand for an image, a video or sound that the engine does not take.
        streams: packed streams of a micro-batch.
        may_share: whether the model can compute common prefixes once.
        images: images that the model takes; ``None`` if it is trained on text alone.
    """

    spec: MicroBatchSpec
    align: int
    vocab_size: int
    value_head: bool
    routing: RoutingRules
    adapters: bool = False
    media_tokens: frozenset[int] = frozenset()
    streams: int = 1
    may_share: bool = True
    images: ImageRules | None = None

    def cutting_by(self, spec: MicroBatchSpec | None) -> BatchRules:
        """Return the rules of a call that names a budget and granularity; ``None`` for these rules."""
        return self if spec is None else replace(self, spec=spec)

    def check_outputs(self, outputs: Outputs) -> None:
        """Check that the model has the requested outputs.

        Raises:
            ValueError: names the output and the way out.
        """
        check_outputs(outputs, value_head=self.value_head, vocab_size=self.vocab_size)
        self.routing.check_outputs(outputs)

    def plan(
        self, batch: BatchInput, outputs: Outputs, *, trees: bool = True, adapters: Sequence[str] | None = None
    ) -> BatchPlan:
        """Check a batch and divide it into micro-batches, without communication.

        Args:
            batch: padded dict or list of samples.
            outputs: per-token outputs that the call computes.
            trees: as in :func:`~areal.utils.data.plan_batch`.
            adapters: names of the engine's adapters. A driver does not know them, and leaves the indices to the engine.

        Raises:
            ValueError: the batch or an output is invalid. Names the key, the value and the way out.
        """
        self.check_outputs(outputs)
        check_sharing(self.spec, possible=self.may_share)
        plan = plan_batch(
            batch,
            self.spec,
            align=self.align,
            vocab_size=self.vocab_size,
            trees=trees,
            streams=self.streams,
            images=self.images,
        )
        _check_temperature(plan)
        _check_media_tokens(plan, self.media_tokens)
        self.routing.check(plan)
        if plan.adapters is not None and not self.adapters:
            raise ValueError(
                f"key {ADAPTER!r} is in the batch, but the engine has no adapters: leave it out, or set TrainEngineConfig.lora=LoRAConfig(...)"
            )
        if adapters is not None:
            _check_indices(plan.adapters or (), adapters)
        return plan


class ContextCheck:
    """What happens to sequences that are longer than those for which the model was made: the first one is named in the log."""

    def __init__(self) -> None:
        self._warned = False

    def check(self, longest: int, positions: int | None, in_table: bool, speaks: bool) -> None:
        """Warn once, or raise on all ranks.

        Args:
            longest: length of the longest sequence of a call, over all ranks.
            positions: positions of the model; ``None`` without a limit.
            in_table: whether positions are learned: there are no more.
            speaks: whether this rank logs the warning.

        Raises:
            ValueError: a sequence is longer than a table of learned positions.
        """
        if positions is None or longest <= positions:
            return
        if in_table:
            raise ValueError(
                f"a sequence has {longest} tokens, and the model has learned {positions} positions (max_position_embeddings): shorten the "
                "sequences"
            )
        if self._warned:
            return
        self._warned = True
        if speaks:
            logger.warning(
                "a sequence has %d tokens, and the model was made for %d (max_position_embeddings): its log-probs may be meaningless "
                "after that; shorten the sequences, or extend the model's context in config.json",
                longest,
                positions,
            )


def check_sharing(spec: MicroBatchSpec, *, possible: bool) -> None:
    """Raise if prefixes are to be shared, and the model runs one sequence per row, or its engine has no such option.

    Raises:
        ValueError: ``spec.share_prefixes`` is set.
    """
    if spec.share_prefixes and not possible:
        raise ValueError(
            "mb_spec.share_prefixes = True, but this model, or a layer of it, runs one sequence per row, where nothing can be shared: set "
            "it to False"
        )


def _check_temperature(plan: BatchPlan) -> None:
    """Raise if the key ``temperature`` is not one number per sequence.

    Raises:
        ValueError: the key is per-token, or has more than one value per sequence.
    """
    temperature = {**plan.tokens, **plan.sequences}.get("temperature")
    if temperature is not None and ("temperature" in plan.tokens or temperature.dim() != 1):
        raise ValueError("key 'temperature' is not one number per sequence: pass [B], or a scalar in each sample")


def _check_media_tokens(plan: BatchPlan, media_tokens: frozenset[int]) -> None:
    """Raise if a token stands for an image, a video or sound: the model would see its embedding in place of them.

    Raises:
        ValueError: names the token.
    """
    for token in media_tokens if plan.n_mbs else ():
        if bool((plan.tokens["input_ids"] == token).any()):
            raise ValueError(
                f"input_ids has the token {token}, which stands for an image, a video or sound that this engine does not take: leave such "
                "samples out"
            )


def _check_indices(indices: Sequence[int], names: Sequence[str]) -> None:
    """Raise if a sample does not name an adapter of the engine.

    Raises:
        ValueError: names the sample and its value.
    """
    for sample, index in enumerate(indices):
        if not 0 <= index < len(names):
            raise ValueError(
                f"key {ADAPTER!r} is {index} in sample {sample}: it is an index in engine.adapters.names = {tuple(names)}, from 0 to "
                f"{len(names) - 1}"
            )


def empty_batch(dropped: int) -> ValueError:
    """Return the error for a global batch without a sample. Its text is the same on all ranks."""
    if dropped:
        return ValueError(
            f"empty batch: all {dropped} sequences of the global batch were dropped for their length: raise "
            "MicroBatchSpec.max_tokens_per_mb, set overlong='alone', or skip the call on all ranks"
        )
    return ValueError(
        "empty batch: no rank has a sample: a rank may pass an empty list while another one has samples; pass at least one sequence, "
        "or skip the call on all ranks"
    )


def check_one_adapter(adapters: Sequence[str] | None, normalization: Normalization, *, steps: bool) -> None:
    """Check that a call whose samples name adapters defines the gradient of each.

    Args:
        adapters: adapters that the samples of all ranks name; ``None`` for the selected one.
        normalization: denominator of the loss.
        steps: the call also takes an optimizer step.

    Raises:
        ValueError: names the argument and the way out.
    """
    if adapters is None:
        return
    if steps:
        raise ValueError(
            f"key {ADAPTER!r} in a batch of train_batch, which steps the selected adapter: call forward_backward, then select each adapter and "
            "call optimizer_step"
        )
    if normalization == "weight" and len(adapters) > 1:
        raise ValueError(
            f"normalization = 'weight' divides by the weight of all samples, but they name {len(adapters)} adapters ({', '.join(adapters)}): "
            "use 'sum', or a number to divide by"
        )


def rules_of(engine: TrainEngine) -> BatchRules | None:
    """Return the rules of an initialized engine; ``None`` for one that does not derive from the template, and checks batches itself."""
    return getattr(engine, "batch_rules", None)
