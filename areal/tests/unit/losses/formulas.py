"""Formulas of papers as plain loops over numbers, in numpy's float64: an independent statement of every loss and advantage.

A loss is a function of the model's outputs ``x`` (what is differentiated), a copy ``still`` of them (where the paper stops the gradient) and
the data. Nothing here imports the library.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]
Loss = Callable[[Arrays, Arrays, "Data"], float]
PerToken = Callable[[Arrays, Arrays, "Data"], list[float]]

CUTS = (0, 6, 7, 14, 17, 22, 31)
"""Offsets of six sequences, the second of one token. Sequence 3 is untrained, and so is the pair that it belongs to."""

GROUP = (0, 0, 0, 1, 1, 1)
"""Group of each sequence."""


class Data:
    """A ragged batch with masked positions, and tokens beyond every clip with advantages of both signs."""

    def __init__(self) -> None:
        rng, n = np.random.default_rng(7), CUTS[-1]
        self.mask = (rng.random(n) < 0.75).astype(float)
        self.mask[6], self.mask[14:17] = 1.0, 0.0
        self.weights = self.mask * rng.choice([0.5, 1.0, 2.0], n)
        self.old = -rng.random(n) * 2 - 0.5
        self.rollout = self.old + rng.normal(0, 0.5, n)
        self.ref = self.old + rng.normal(0, 0.6, n)
        self.new = self.old + rng.normal(0, 0.25, n)
        # Ratios far beyond each bound, up and down, for gains and for losses.
        self.new[self.trained()[:8]] = self.old[self.trained()[:8]] + [1.4, -1.4, 1.5, -1.3, 0.9, -0.8, 2.0, -2.0]
        self.advantages = rng.normal(0, 1, n)
        self.advantages[self.trained()[:8]] = [1.0, 1.1, -0.9, -1.2, 0.8, -0.7, -1.5, 0.6]
        # Ratios of sequences to the rollout: beyond a bound of 2, below and above bounds near 1, and within them.
        for ids, total in zip(self.sequences(), (0.98, -0.3, 0.05, -0.4, 0.3), strict=True):
            self.rollout[ids] += mean(self.old[ids] - self.rollout[ids]) - total / len(ids)
        # A sequence within the narrow bounds of GSPO.
        inside = self.sequences()[3]
        self.new[inside] -= mean(self.new[inside] - self.old[inside]) - 1e-4
        self.entropy = rng.random(n) + 0.2
        self.values, self.old_values, self.returns = rng.normal(0, 1, (3, n))
        self.rewards = rng.normal(0, 1, len(CUTS) - 1)
        self.k = 4
        logits = rng.normal(0, 1, (2, n, 9))
        student, teacher = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        self.student, self.teacher = student[:, : self.k], teacher[:, : self.k]

    def trained(self, start: int = 0, stop: int = CUTS[-1]) -> list[int]:
        """Return the trained positions from ``start`` to ``stop``."""
        return [t for t in range(start, stop) if self.mask[t] != 0]

    def sequences(self) -> list[list[int]]:
        """Return the trained positions of each sequence that has one."""
        return [ids for ids in map(self.trained, CUTS[:-1], CUTS[1:]) if ids]

    def inputs(self) -> Arrays:
        """Return the outputs of the model."""
        return {"logprobs": self.new, "entropy": self.entropy, "values": self.values}


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def mean(numbers: Iterable[float]) -> float:
    given = list(numbers)
    return sum(given) / len(given)


def deviation(numbers: list[float]) -> float:
    center = mean(numbers)
    return math.sqrt(sum((x - center) ** 2 for x in numbers) / (len(numbers) - 1))


# ---- means over a batch


def token_mean(per_token: PerToken) -> Loss:
    return lambda x, still, d: mean(per_token(x, still, d)[t] for t in d.trained())


def sequence_mean(per_token: PerToken) -> Loss:
    def loss(x: Arrays, still: Arrays, d: Data) -> float:
        losses = per_token(x, still, d)
        return mean(mean(losses[t] for t in ids) for ids in d.sequences())

    return loss


def sums_over(length: float, per_token: PerToken) -> Loss:
    def loss(x: Arrays, still: Arrays, d: Data) -> float:
        losses = per_token(x, still, d)
        return mean(sum(losses[t] for t in ids) / length for ids in d.sequences())

    return loss


def group_token_mean(per_token: PerToken) -> Loss:
    def loss(x: Arrays, still: Arrays, d: Data) -> float:
        losses = per_token(x, still, d)
        spans = list(pairwise(CUTS))
        groups = [[t for i, span in enumerate(spans) if GROUP[i] == g for t in d.trained(*span)] for g in (0, 1)]
        return mean(mean(losses[t] for t in ids) for ids in groups)

    return loss


def plus(*losses: PerToken) -> PerToken:
    return lambda x, still, d: [sum(each) for each in zip(*(loss(x, still, d) for loss in losses), strict=True)]


def at_trained(d: Data, formula: Callable[[int], float]) -> list[float]:
    return [formula(t) if d.mask[t] else 0.0 for t in range(CUTS[-1])]


# ---- policy losses


def clipped(ratio: float, advantage: float, low: float, high: float, dual: float | None = None) -> float:
    gain = min(ratio * advantage, clip(ratio, 1 - low, 1 + high) * advantage)
    if dual is not None and advantage < 0:
        gain = max(gain, dual * advantage)
    return -gain


def ppo(low: float, high: float, dual: float | None = None, weights: str | None = None, **bounds: Any) -> PerToken:
    def losses(x: Arrays, still: Arrays, d: Data) -> list[float]:
        w = importance(d, d.old, weights, **bounds) if weights else np.ones(CUTS[-1])
        return at_trained(
            d, lambda t: w[t] * clipped(math.exp(x["logprobs"][t] - d.old[t]), d.advantages[t], low, high, dual)
        )

    return losses


def policy_gradient(x: Arrays, still: Arrays, d: Data) -> list[float]:
    return at_trained(d, lambda t: -d.advantages[t] * x["logprobs"][t])


def one_update(cap: float) -> PerToken:
    """The clip's ratio is to the current policy, so that it is 1, and a truncated weight goes back to the rollout."""

    def losses(x: Arrays, still: Arrays, d: Data) -> list[float]:
        def one(t: int) -> float:
            ratio = math.exp(x["logprobs"][t] - still["logprobs"][t])
            return min(math.exp(still["logprobs"][t] - d.rollout[t]), cap) * -ratio * d.advantages[t]

        return at_trained(d, one)

    return losses


def gspo(low: float, high: float) -> PerToken:
    def losses(x: Arrays, still: Arrays, d: Data) -> list[float]:
        out = [0.0] * CUTS[-1]
        for ids in d.sequences():
            ratio = math.exp(mean(x["logprobs"][t] - d.old[t] for t in ids))
            for t in ids:
                out[t] = clipped(ratio, mean(d.advantages[u] for u in ids), low, high)
        return out

    return losses


def gspo_token(low: float, high: float) -> PerToken:
    def losses(x: Arrays, still: Arrays, d: Data) -> list[float]:
        out = [0.0] * CUTS[-1]
        for ids in d.sequences():
            sequence = math.exp(mean(still["logprobs"][t] - d.old[t] for t in ids))
            for t in ids:
                ratio = sequence * math.exp(x["logprobs"][t]) / math.exp(still["logprobs"][t])
                out[t] = clipped(ratio, d.advantages[t], low, high)
        return out

    return losses


def cispo(low: float, high: float) -> PerToken:
    def losses(x: Arrays, still: Arrays, d: Data) -> list[float]:
        weight = [clip(math.exp(n - o), 1 - low, 1 + high) for n, o in zip(still["logprobs"], d.old, strict=True)]
        return at_trained(d, lambda t: -weight[t] * d.advantages[t] * x["logprobs"][t])

    return losses


def sapo(tau_pos: float, tau_neg: float) -> PerToken:
    def losses(x: Arrays, still: Arrays, d: Data) -> list[float]:
        def one(t: int) -> float:
            tau = tau_pos if d.advantages[t] > 0 else tau_neg
            gate = 1 / (1 + math.exp(-tau * (math.exp(x["logprobs"][t] - d.old[t]) - 1)))
            return -4 / tau * gate * d.advantages[t]

        return at_trained(d, one)

    return losses


def dro(beta: float) -> Loss:
    def loss(x: Arrays, still: Arrays, d: Data) -> float:
        total = []
        for ids in d.sequences():
            gain = sum(d.advantages[t] * x["logprobs"][t] for t in ids)
            total.append(-gain + beta / 2 * sum(x["logprobs"][t] - d.ref[t] for t in ids) ** 2)
        return mean(total)

    return loss


def importance(
    d: Data, trainer: np.ndarray, level: str, mode: str = "truncate", cap: float = math.inf, floor: float = 0.0
) -> np.ndarray:
    weights = np.zeros(CUTS[-1])
    for ids in d.sequences():
        logs = [trainer[t] - d.rollout[t] for t in ids]
        for t, own in zip(ids, logs, strict=True):
            log = {"token": own, "sequence": sum(logs), "geometric": mean(logs)}[level]
            ratio = math.exp(log)
            outside = ratio > cap or ratio < floor
            weights[t] = clip(ratio, floor, cap) if mode == "truncate" else 0.0 if outside else ratio
    return weights


# ---- penalties


def kl(name: str, coef: float, *, weighted: bool = False, bound: float = math.inf) -> PerToken:
    def losses(x: Arrays, still: Arrays, d: Data) -> list[float]:
        def one(t: int) -> float:
            gap = d.ref[t] - x["logprobs"][t]
            value = {"k1": -gap, "k2": gap**2 / 2, "k3": math.exp(gap) - gap - 1}[name]
            ratio = math.exp(x["logprobs"][t] - d.old[t]) if weighted else 1.0
            return coef * ratio * clip(value, -bound, bound)

        return at_trained(d, one)

    return losses


def entropy_bonus(coef: float) -> PerToken:
    return lambda x, still, d: at_trained(d, lambda t: -coef * x["entropy"][t])


# ---- values, preferences, distillation, cross-entropy


def value(bound: float) -> PerToken:
    def losses(x: Arrays, still: Arrays, d: Data) -> list[float]:
        def one(t: int) -> float:
            near = d.old_values[t] + clip(x["values"][t] - d.old_values[t], -bound, bound)
            return max((x["values"][t] - d.returns[t]) ** 2, (near - d.returns[t]) ** 2) / 2

        return at_trained(d, one)

    return losses


def on_pairs(formula: Callable[[float, float], float], *, average: bool = False) -> Loss:
    """Mean over pairs of a formula of two log-ratios to the reference."""

    def loss(x: Arrays, still: Arrays, d: Data) -> float:
        ratios = []
        for start, stop in pairwise(CUTS):
            ids = d.trained(start, stop)
            total = sum(d.weights[t] * (x["logprobs"][t] - d.ref[t]) for t in ids)
            ratios.append(None if not ids else total / sum(d.weights[t] for t in ids) if average else total)
        pairs = zip(ratios[::2], ratios[1::2], strict=True)
        return mean(formula(c, r) for c, r in pairs if c is not None and r is not None)

    return loss


def log_sigmoid(x: float) -> float:
    return -math.log(1 + math.exp(-x))


def dpo(beta: float, smoothing: float) -> Loss:
    def formula(chosen: float, rejected: float) -> float:
        h = beta * (chosen - rejected)
        return -(1 - smoothing) * log_sigmoid(h) - smoothing * log_sigmoid(-h)

    return on_pairs(formula)


def ipo(beta: float, *, average: bool) -> Loss:
    return on_pairs(lambda chosen, rejected: (chosen - rejected - 1 / (2 * beta)) ** 2, average=average)


def bradley_terry(center: float) -> Loss:
    def loss(x: Arrays, still: Arrays, d: Data) -> float:
        last = [x["values"][stop - 1] for stop in CUTS[1:]]
        pairs = zip(last[::2], last[1::2], strict=True)
        return mean(-log_sigmoid(c - r) + center * (c + r) ** 2 for c, r in pairs)

    return loss


def distill(*, forward: bool) -> PerToken:
    """KL over K tokens and the rest."""

    def outcomes(logs: np.ndarray) -> list[float]:
        of_tokens = [math.exp(x) for x in logs]
        return [*of_tokens, 1 - sum(of_tokens)]

    def losses(x: Arrays, still: Arrays, d: Data) -> list[float]:
        def one(t: int) -> float:
            student, teacher = outcomes(x["logprobs"][t]), outcomes(d.teacher[t])
            a, b = (teacher, student) if forward else (student, teacher)
            return sum(p * (math.log(p) - math.log(q)) for p, q in zip(a, b, strict=True))

        return at_trained(d, one)

    return losses


def cross_entropy(x: Arrays, still: Arrays, d: Data) -> float:
    total = sum(-d.weights[t] * x["logprobs"][t] for t in d.trained())
    return total / sum(d.weights[t] for t in d.trained())


# ---- gradients


def gradients(loss: Loss, x: Arrays, d: Data, step: float = 1e-5) -> Arrays:
    """Return central differences (of fourth order) of a loss by every output, with the stopped copy left alone."""
    out = {}
    for name, array in x.items():
        out[name] = np.zeros_like(array)
        for index in np.ndindex(array.shape):

            def moved(by: float, name: str = name, index: tuple[int, ...] = index) -> float:
                there = {key: values.copy() for key, values in x.items()}
                there[name][index] += by
                return loss(there, x, d)

            near, far = moved(step) - moved(-step), moved(2 * step) - moved(-2 * step)
            out[name][index] = (8 * near - far) / (12 * step)
    return out
