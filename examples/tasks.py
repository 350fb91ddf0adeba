"""Problems with a verifier, from reasoning-gym's procedural data sets: unlimited and without a download."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import reasoning_gym

OPTIONS: dict[str, dict[str, Any]] = {"chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}}
"""Default options of a data set: problems that a model of 100M parameters can learn within minutes."""


@dataclass(frozen=True)
class Problem:
    """A question, its answer, and the data set's entry, which the verifier needs."""

    question: str
    answer: str
    entry: dict[str, Any] = field(repr=False)


@dataclass(frozen=True)
class Task:
    """Training problems and held-out problems, with disjoint questions.

    Attributes:
        name: name of the reasoning-gym data set.
        train: training problems in the order of their generation. Questions may repeat, as in the data set.
        held_out: held-out problems without repetition.
        scorer: the data set, for its verifier.
    """

    name: str
    train: tuple[Problem, ...]
    held_out: tuple[Problem, ...]
    scorer: Any = field(repr=False)

    def is_right(self, answer: str, problem: Problem) -> bool:
        """Return True if the data set's verifier gives ``answer`` the full score."""
        return float(self.scorer.score_answer(answer.strip(), problem.entry)) >= 1.0


def make_task(name: str, n_train: int, n_held_out: int, seed: int, options: Mapping[str, Any] | None = None) -> Task:
    """Generate a task. The same arguments give the same problems, on every rank and machine.

    Args:
        name: any reasoning-gym data set, such as ``"chain_sum"`` or ``"simple_equations"``.
        n_train: number of training problems.
        n_held_out: number of held-out problems.
        seed: seed of the data set.
        options: options of the data set. Default: :data:`OPTIONS`, or else the data set's defaults.

    Raises:
        ValueError: data set or option is unknown, or the data set has too few different questions.
    """
    options = dict(options or OPTIONS.get(name, {}))
    # With a margin for repeated questions. A small one: the time to generate some data sets is proportional to their size.
    size = 4 * (n_train + n_held_out) + 64
    try:
        dataset = reasoning_gym.create_dataset(name, size=size, seed=seed, **options)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(
            f"task = {name!r} with options {options}: {error or 'the data set refuses these options'}"
        ) from error
    held_out: dict[str, Problem] = {}
    train: list[Problem] = []
    for problem in _entries(dataset, size):
        if len(held_out) < n_held_out:
            held_out.setdefault(problem.question, problem)
        elif problem.question not in held_out:
            train.append(problem)
        if len(held_out) == n_held_out and len(train) == n_train:
            return Task(name=name, train=tuple(train), held_out=tuple(held_out.values()), scorer=dataset)
    raise ValueError(
        f"task = {name!r} with options {options}: {size} problems gave {len(held_out)} of {n_held_out} held-out "
        f"questions and {len(train)} of {n_train} training problems: hold out fewer, or choose options that have more"
    )


def _entries(dataset: Any, size: int) -> Iterator[Problem]:
    for index in range(size):
        entry = dataset[index]
        yield Problem(question=entry["question"], answer=str(entry["answer"]), entry=entry)
