"""Pairwise selection of grid cells covers every pair of values."""

from itertools import combinations
from typing import Any

import pytest

from areal.tests.grid.layouts import FACTORS, OFTEN, Cell, fits
from areal.tests.grid.pairwise import pairwise_rows


def test_every_possible_pair_is_covered() -> None:
    rows = pairwise_rows(FACTORS, fits, OFTEN)
    met = {(a, str(row[a]), b, str(row[b])) for row in rows for a, b in combinations(FACTORS, 2)}
    for a, b in combinations(FACTORS, 2):
        for v in FACTORS[a]:
            for w in FACTORS[b]:
                assert ((a, str(v), b, str(w)) in met) == fits({a: v, b: w}), (a, v, b, w)
    assert all(fits(row) for row in rows)
    assert len({str(Cell(**row)) for row in rows}) == len(rows)


def test_pairwise_rows_are_few_and_deterministic() -> None:
    factors: dict[str, Any] = {name: [f"{name}{i}" for i in range(4)] for name in "abcde"}
    rows = pairwise_rows(factors, lambda row: True)
    assert rows == pairwise_rows(factors, lambda row: True)
    assert len(rows) <= 26  # 16 of the 1024 combinations is the minimum


def test_unsatisfiable_factor_raises() -> None:
    with pytest.raises(ValueError, match="no value of 'c'"):
        pairwise_rows({"a": [1], "b": [2], "c": [3]}, lambda row: len(row) < 3)
