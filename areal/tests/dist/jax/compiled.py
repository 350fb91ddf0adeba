"""The compiled programs of an engine: their collectives, and what is kept between forward and backward."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import jax
import pytest

from areal.api import TrainEngine
from areal.engine.jax import bridge
from areal.tests.harness.tiny import global_batch, local_batch, loss

_COLLECTIVE = re.compile(r" = (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(-start)?\(")
_FUNCTION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_LOOP = re.compile(r' while\(.*body=%?([\w.\-]+).*?known_trip_count":\{"n":"(\d+)"')


@dataclass(frozen=True)
class Collective:
    """One result of a collective in a compiled program.

    Attributes:
        kind, dtype: names in the text of the program.
        shape: of the result on one rank.
        times: trips of the loops around it. A loop with an unknown number of trips counts as one.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    times: int = 1

    def elements(self, ranks: int) -> int:
        """Return how many elements a rank sends and receives, up to the factor ``(ranks - 1) / ranks`` of a ring."""
        return math.prod(self.shape) * self.times * {"all-reduce": 2, "reduce-scatter": ranks}.get(self.kind, 1)


def collectives(program: str) -> list[Collective]:
    """Return the collectives of a compiled program, by its text."""
    lines: dict[str, list[str]] = {}
    inside: list[str] = []
    for line in program.splitlines():
        begins = _FUNCTION.match(line)
        if begins:
            inside = lines.setdefault(begins[1], [])
        inside.append(line)
    # The function around each body of a loop, and the trips.
    loops = {m[1]: (name, int(m[2])) for name, those in lines.items() for line in those if (m := _LOOP.search(line))}

    def times(name: str) -> int:
        around, trips = loops.get(name, ("", 1))
        return trips * times(around) if around else 1

    return [
        Collective(match[2], dtype, tuple(int(n) for n in shape.split(",") if n), times(name))
        for name, those in lines.items()
        for line in those
        if (match := _COLLECTIVE.search(line))
        for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", match[1])
    ]


def compiled(engine: TrainEngine) -> tuple[dict[str, list[Collective]], list[jax.Array]]:
    """Run a forward, and a forward with a backward. Returns the collectives of the programs by function, and the residuals."""
    found: dict[str, list[Collective]] = {}
    residuals: list[jax.Array] = []

    def recording(name: str, program: Any) -> Any:
        def run(*args: Any) -> Any:
            found[name] = collectives(program.lower(*args).compile().as_text())
            result = program(*args)
            if name == "_forward" and not residuals:  # those of the first micro-batch
                residuals.extend(result[-1].leaves)
            return result

        return run

    with pytest.MonkeyPatch.context() as patch:
        for name in ("_evaluate", "_forward", "_pull"):
            patch.setattr(bridge, name, recording(name, getattr(bridge, name)))
        batch = local_batch(engine, global_batch())
        engine.forward_batch(batch)
        engine.forward_backward(batch, loss)
    return found, residuals
