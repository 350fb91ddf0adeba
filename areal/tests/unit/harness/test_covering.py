"""Pairwise selection of grid cells covers every pair of values."""

from itertools import combinations
from typing import Any

import pytest

from areal.tests.grid.covering import covering
from areal.tests.grid.layouts import FACTORS, Cell, fits


def test_every_pair_that_fits_is_met() -> None:
    rows = covering(FACTORS, fits, often={"float64": 8})
    met = {(a, str(row[a]), b, str(row[b])) for row in rows for a, b in combinations(FACTORS, 2)}
    for a, b in combinations(FACTORS, 2):
        for v in FACTORS[a]:
            for w in FACTORS[b]:
                assert ((a, str(v), b, str(w)) in met) == fits({a: v, b: w}), (a, v, b, w)
    assert all(fits(row) for row in rows)
    assert len({str(Cell(**row)) for row in rows}) == len(rows)


def test_rows_are_few_and_the_same_each_time() -> None:
    factors: dict[str, Any] = {name: [f"{name}{i}" for i in range(4)] for name in "abcde"}
    rows = covering(factors, lambda row: True)
    assert rows == covering(factors, lambda row: True)
    assert len(rows) <= 26  # 16 of the 1024 combinations is the minimum


def test_a_dead_end_is_named() -> None:
    with pytest.raises(ValueError, match="no value of 'c'"):
        covering({"a": [1], "b": [2], "c": [3]}, lambda row: len(row) < 3)
