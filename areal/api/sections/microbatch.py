"""Rules for cutting a batch into micro-batches."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from areal.api.sections.strict import StrictConfig


class MicroBatchSpec(StrictConfig):
    """Rules for cutting a rank's batch into micro-batches. The gradient does not depend on them.

    Without ``max_tokens_per_mb``, ``samples_per_mb`` and ``n_mbs``, the batch of a rank is one micro-batch.

    ``overlong`` applies to sequences longer than the budget: ``"error"`` raises on every rank, ``"alone"`` puts each into
    a separate micro-batch that exceeds the budget, ``"drop"`` excludes them (their outputs are zeros, and
    ``StepOutput.metrics["dropped_sequences"]`` counts them).
    """

    max_tokens_per_mb: int | None = Field(
        default=None, gt=0, description="Maximum tokens in a micro-batch, padding and alignment included."
    )
    n_mbs: int | None = Field(default=None, gt=0, description="Minimum number of micro-batches on a rank.")
    samples_per_mb: int | None = Field(
        default=None,
        gt=0,
        description="Consecutive samples of each micro-batch, instead of a budget; the last one has the remaining samples.",
    )
    granularity: int = Field(
        default=1, gt=0, description="Consecutive samples that stay in one micro-batch (2 for preference pairs)."
    )
    overlong: Literal["error", "alone", "drop"] = Field(
        default="error", description="Treatment of sequences above the budget."
    )
    equal_batches: Literal["error", "allow"] = Field(
        default="error",
        description="Treatment of one batch on all data-parallel ranks, in a call with a loss, which would count it several times.",
    )
    share_prefixes: bool = Field(
        default=False,
        description="Compute common prefixes of the sequences of a micro-batch once; the budget counts them once.",
    )
    per_sequence: tuple[str, ...] = Field(
        default=(), description="Keys with one row per sequence, for tensors whose shape suggests otherwise."
    )
    payloads: tuple[str, ...] = Field(
        default=(), description="Keys that are lists with one tensor of any size per sample."
    )

    @model_validator(mode="after")
    def _samples_or_budget(self) -> MicroBatchSpec:
        samples = self.samples_per_mb
        if samples is None:
            return self
        for name in ("max_tokens_per_mb", "n_mbs"):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"MicroBatchSpec.samples_per_mb = {samples} with {name} = {getattr(self, name)}: both cut the batch; leave one of them out"
                )
        if samples % self.granularity:
            raise ValueError(
                f"MicroBatchSpec.samples_per_mb = {samples} with granularity = {self.granularity}: choose a multiple of the granularity"
            )
        return self

    def resized(self, **fields: Any) -> MicroBatchSpec:
        """Return the same rules with another size of micro-batches, for the ``mb_spec`` of a call.

        Args:
            fields: values that replace those of these rules. ``max_tokens_per_mb``, ``samples_per_mb`` and ``n_mbs`` are unset without a value.

        Raises:
            ValueError: a value is out of range, or two fields do not fit.
        """
        sizes = {"max_tokens_per_mb", "samples_per_mb", "n_mbs"}
        return MicroBatchSpec(**{**self.model_dump(exclude=sizes), **fields})
