"""Mixtures of experts by hand: loss, balancing losses and routing of one process in float64, one sequence at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from areal.engine.moe.balance_loss import AUX_LOSS, Z_LOSS
from areal.tests.grid.cases import as_input, samples
from areal.tests.grid.cell_engine import CellEngine
from areal.tests.grid.float64_mode import float64_everywhere
from areal.tests.grid.layouts import Cell
from areal.tests.grid.reference import Reference, one_sequence
from areal.tests.harness.world import cached

TOLERANCE = 1e-10
COEFFICIENTS = {AUX_LOSS: 0.5, Z_LOSS: 0.25}

SHAPES = {"qwen3_moe": (2, 4), "deepseek_v3": (1, 8)}
"""Layers with experts, and experts per layer."""


@dataclass
class MoEReference:
    """Results of one global batch, computed with transformers' model.

    Attributes:
        loss: undivided sums of the loss and of the balancing losses.
        weight: weight of the loss.
        experts: ``[S, L, K]`` for each sequence.
        load: ``[L, E]``. Number of tokens per expert.
        logprobs: log-probs for each sequence.
    """

    loss: dict[str, float]
    divisors: dict[str, float]
    gradients: dict[str, Tensor] = field(default_factory=dict)
    experts: list[Tensor] = field(default_factory=list)
    load: Tensor = field(default_factory=lambda: torch.zeros(0))
    logprobs: list[Tensor] = field(default_factory=list)

    @property
    def grad_norm(self) -> float:
        return sum(x.square().sum().item() for x in self.gradients.values()) ** 0.5


def moe_reference(
    cell: Cell,
    *,
    divide_by: float | None = None,
    loss_weight: float = 1.0,
    replay: list[Tensor] | None = None,
    name: str = "by chance",
) -> MoEReference:
    """Compute the step of a cell's global batch. ``name`` selects the replayed routing.

    Balancing losses are those of ``COEFFICIENTS``, or none if the cell has none.
    """
    coefficients = COEFFICIENTS if cell.layout.options["moe"] else {}

    def compute() -> MoEReference:
        reference, objective = Reference(cell.path, temperature=cell.case.temperature), cell.objective
        batch = samples(cell.case)
        lengths = [len(sample["input_ids"]) for sample in batch]
        weight = sum(float(objective.weight_fn(one_sequence(sample))) for sample in batch)
        divisors = {"loss": weight, AUX_LOSS: float(len(batch)), Z_LOSS: float(sum(lengths))}
        factors = {"loss": 1.0, **coefficients}
        actual = MoEReference(dict.fromkeys(factors, 0.0), divisors)
        for i, sample in enumerate(batch):
            with routers(reference, None if replay is None else replay[i]) as seen, float64_everywhere():
                outputs = reference.outputs(sample)
                terms = {
                    "loss": objective.loss_fn(outputs, one_sequence(sample))[0],
                    AUX_LOSS: torch.tensor(0.0),
                    Z_LOSS: torch.tensor(0.0),
                }
                for logits, experts in seen:
                    tokens, chosen = experts.shape
                    share_of = torch.zeros(logits.shape[1], dtype=torch.float64)
                    for token in experts:
                        for expert in token:
                            share_of[expert] += 1 / (tokens * chosen)
                    scores = torch.sigmoid(logits) if cell.family == "deepseek_v3" else torch.softmax(logits, -1)
                    mean = (scores / scores.sum(-1, keepdim=True)).mean(0)
                    terms[AUX_LOSS] = terms[AUX_LOSS] + logits.shape[1] * (share_of * mean).sum()
                    terms[Z_LOSS] = terms[Z_LOSS] + (logits.exp().sum(-1).log() ** 2).sum()
                total = sum(
                    factor * loss_weight * terms[name] / (divisors[name] if divide_by is None else divide_by)
                    for name, factor in factors.items()
                )
                total.backward()
            for term_name, factor in factors.items():
                actual.loss[term_name] += factor * terms[term_name].item()
            actual.experts.append(torch.stack([experts for _, experts in seen], 1))
            actual.logprobs.append(outputs.logprobs.detach())
        every = torch.cat(actual.experts)
        actual.load = torch.nn.functional.one_hot(every, SHAPES[cell.family][1]).sum((0, 2)).double()
        actual.gradients = dict(reference.named_gradients())
        return actual

    given = (divide_by, loss_weight, name if replay else "", bool(coefficients))
    return cached("moe", (cell.path, cell.case_name, cell.objective_name, *given), compute)


@contextlib.contextmanager
def routers(reference: Reference, replay: Tensor | None) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Capture the logits and experts of each router in the next forward; ``replay`` ``[S, L, K]`` overrides the experts, except by -1."""
    seen: list[tuple[Tensor, Tensor]] = []

    def hook(router: Any, args: Any, out: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, experts = out
        sigmoid = hasattr(router, "e_score_correction_bias")
        if replay is not None:
            experts = torch.where(replay[:, len(seen)] < 0, experts, replay[:, len(seen)])
            score = torch.sigmoid if sigmoid else lambda row: torch.softmax(row, -1)
            chosen = torch.stack([score(row)[ids] for row, ids in zip(logits, experts, strict=True)])
            weights = chosen / chosen.sum(-1, keepdim=True) * (router.routed_scaling_factor if sigmoid else 1.0)
        elif sigmoid:  # unsorted
            experts = experts.gather(1, weights.argsort(-1, descending=True))
            weights = weights.sort(-1, descending=True).values
        seen.append((logits, experts))
        return logits, weights, experts

    hooks = [
        m.register_forward_hook(hook)
        for m in reference.model.modules()
        if type(m).__name__.lower().endswith("topkrouter")
    ]
    yield seen
    for handle in hooks:
        handle.remove()


def recorded(lengths: tuple[int, ...], layers: int = 2, experts: int = 4) -> list[Tensor]:
    """Draw two experts for each token and layer."""
    generator = torch.Generator().manual_seed(7)
    return [torch.rand(length, layers, experts, generator=generator).argsort(-1)[..., :2] for length in lengths]


def with_replay(run: CellEngine, experts: list[Tensor]) -> Any:
    """Return this rank's shard of the batch, with the experts to replay."""
    batch = [{**sample, "routed_experts": experts[i].int()} for i, sample in enumerate(run.samples())]
    return as_input([batch[i] for i in run.local_indices], run.cell.case.form, like=batch[0])


def assert_terms(step: Any, expected: MoEReference, divide_by: float | None = None, loss_weight: float = 1.0) -> None:
    terms = {
        name: loss_weight * value / (expected.divisors[name] if divide_by is None else divide_by)
        for name, value in expected.loss.items()
    }
    assert step.terms == pytest.approx(terms, rel=TOLERANCE)
    assert step.loss == pytest.approx(sum(terms.values()), rel=TOLERANCE)
