"""Pairwise selection: few combinations of values that cover every pair."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

Row = dict[str, Any]


def pairwise_rows(
    factors: Mapping[str, Sequence[Any]],
    fits: Callable[[Row], bool],
    often: Mapping[Any, float] | None = None,
    needed: Callable[[str, Any, str, Any], bool] = lambda *_: True,
) -> list[Row]:
    """Return rows with a value per factor, in which any two values of different factors occur together at least once, if they fit.

    Greedy and deterministic. If a factor adds no new pair, its least used value is taken.

    Args:
        factors: name of a factor -> its values, which are distinguished by ``str``.
        fits: predicate on a row, complete or not. False if the row is not possible.
        often: value -> how much more often than others it is taken.
        needed: predicate on the names and values of two factors. False if they need not occur together.

    Raises:
        ValueError: values that fit in pairs fit no value of some other factor.
    """
    weights = {str(value): weight for value, weight in (often or {}).items()}
    used: Counter[str] = Counter()
    open_pairs = dict.fromkeys(
        _key(a, v, b, w)
        for a, b in combinations(factors, 2)
        for v in factors[a]
        for w in factors[b]
        if needed(a, v, b, w) and fits({a: v, b: w})
    )
    values = {(name, str(value)): value for name in factors for value in factors[name]}
    rows: list[Row] = []
    while open_pairs:
        first = next(iter(open_pairs))
        row: Row = {name: values[name, text] for name, text in first}
        for name in factors:
            if name not in row:
                row[name] = _best(name, factors[name], row, fits, open_pairs, used, weights)
        rows.append(row)
        used.update(f"{name}={value}" for name, value in row.items())
        for pair in [first, *_pairs(row)]:
            open_pairs.pop(pair, None)
    return rows


def _best(
    name: str,
    candidates: Sequence[Any],
    row: Row,
    fits: Callable[[Row], bool],
    open_pairs: Mapping[Any, None],
    used: Counter[str],
    weights: Mapping[str, float],
) -> Any:
    def rank(value: Any) -> tuple[int, float]:
        met = sum(_key(name, value, other, known) in open_pairs for other, known in row.items())
        return -met, used[f"{name}={value}"] / weights.get(str(value), 1.0)

    fitting = [value for value in candidates if fits({**row, name: value})]
    if not fitting:
        raise ValueError(
            f"no value of {name!r} goes with {row}: give the factor one that does, or make fits refuse the pair"
        )
    return min(fitting, key=rank)


def _pairs(row: Row) -> Iterable[tuple[tuple[str, str], ...]]:
    return (_key(a, row[a], b, row[b]) for a, b in combinations(row, 2))


def _key(a: str, v: Any, b: str, w: Any) -> tuple[tuple[str, str], ...]:
    return tuple(sorted([(a, str(v)), (b, str(w))]))
