"""Collectives of a compiled program, read from its text in XLA's language (HLO)."""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from areal.plan.step_recorder import Collective, CollectiveCalls

_COLLECTIVE = re.compile(r" = (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(-start)?\(")
_FUNCTION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_LOOP = re.compile(r" while\(.*condition=%?([\w.\-]+)")
_TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')
_BOUND = re.compile(r" = s32\[\]\S* constant\((\d+)\)")
_CALLED = re.compile(r"(?:body|calls|to_apply)=%?([\w.\-]+)")
_SCATTERED = "all-reduce-scatter"
"""Beginning of the names of functions in which a program for TPUs reduces an array and cuts the result: a reduce-scatter."""

_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{.*?\})\}")
_RANGE = re.compile(r"replica_groups=(\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)")
_OF_AXES = re.compile(r"replica_groups=mesh\[(.*?)\](?:, device_ids=\((.*?\)?)\))? \{(.*?)\}")


@dataclass(frozen=True)
class CompiledCollective:
    """One result of a collective in a compiled program.

    Attributes:
        kind, dtype: names in the text of the program.
        shape: of the result on one rank.
        times: trips of the loops around it. A loop with an unknown number of trips counts as one.
        groups: indices of the ranks that communicate; of a permutation, senders with their receivers. Empty for all ranks.
        first: whether this is the first result of its instruction.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    times: int = 1
    groups: tuple[tuple[int, ...], ...] = ()
    first: bool = True

    def elements(self, ranks: int) -> int:
        """Return how many elements a rank sends and receives, up to the factor ``(ranks - 1) / ranks`` of a ring."""
        ways = len(self.groups[0]) if self.groups else ranks
        return math.prod(self.shape) * self.times * {"all-reduce": 2, "reduce-scatter": ways}.get(self.kind, 1)

    @property
    def nbytes(self) -> int:
        """Bytes of the larger buffer on a rank, once."""
        bits = re.search(r"\d+", self.dtype)
        size = len(self.groups[0]) if self.kind == "reduce-scatter" and self.groups else 1
        return math.prod(self.shape) * size * (int(bits[0]) if bits else 8) // 8


def collectives(program: str) -> list[CompiledCollective]:
    """Return the collectives of a compiled program, by its text."""
    lines: dict[str, list[str]] = {}
    inside: list[str] = []
    for line in program.splitlines():
        begins = _FUNCTION.match(line)
        if begins:
            inside = lines.setdefault(begins[1], [])
        inside.append(line)
    # The functions that call each function, with the trips of the loop, if it is the body of one.
    callers: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for name, those in lines.items():
        for line in those:
            loop = _LOOP.search(line)
            for called in _CALLED.findall(line):
                callers[called].append((name, _trips(line, lines.get(loop[1], ())) if loop else 1))

    def times(name: str) -> int:
        return sum(trips * times(caller) for caller, trips in callers[name]) if name in callers else 1

    found = []
    for name, those in lines.items():
        for line in those:
            match = _COLLECTIVE.search(line)
            if match is None:
                continue
            kind, results = match[2], match[1]
            if name.startswith(_SCATTERED):
                kind, results = "reduce-scatter", those[0].rpartition("->")[2]
            groups = _groups(line)
            for place, (dtype, shape) in enumerate(_arrays(kind, results, started=bool(match[3]))):
                sizes = tuple(int(n) for n in shape.split(",") if n)
                found.append(CompiledCollective(kind, dtype, sizes, times(name), groups, place == 0))
    return found


def _trips(loop: str, condition: Sequence[str]) -> int:
    """Return the trips of a loop by its instruction; else by its condition, a counter from 0 below a constant; 1 if neither says."""
    if known := _TRIPS.search(loop):
        return int(known[1])
    bounds = [int(bound[1]) for line in condition if (bound := _BOUND.search(line))]
    return bounds[0] if len(bounds) == 1 and any("direction=LT" in line for line in condition) else 1


def _arrays(kind: str, results: str, *, started: bool) -> list[tuple[str, str]]:
    """Return dtypes and shapes of the results of a collective. The type of an asynchronous one's start has the operands, too."""
    arrays: list[tuple[str, str]] = re.findall(r"(\w+)\[([\d,]*)\]", results)
    if started and kind == "all-gather":
        return arrays[len(arrays) // 2 :]
    return arrays[1:2] if started and kind == "collective-permute" else arrays


def step_collectives(programs: Mapping[str, int], mesh: Mapping[str, int]) -> dict[Collective, CollectiveCalls]:
    """Return the collectives of a step by kind, with calls and bytes on one rank.

    Args:
        programs: texts of compiled programs, with the number of their runs.
        mesh: sizes of the axes of the mesh of devices. Indices of ranks are those of its order.
    """
    found: dict[Collective, CollectiveCalls] = {}
    for text, runs in programs.items():
        for each in collectives(text):
            axes = _axes(each.groups, mesh)
            size = math.prod(mesh[axis] for axis in axes)
            if size == 1:
                continue
            places = np.arange(math.prod(mesh.values())).reshape(list(mesh.values()))
            line = places[tuple(slice(None) if axis in axes else 0 for axis in mesh)].flatten()
            kind = Collective(each.kind.replace("-", "_"), "+".join(axes), size, int(line[1] - line[0]))
            calls = found.setdefault(kind, CollectiveCalls())
            calls.count += runs * each.times * each.first
            calls.nbytes += runs * each.times * each.nbytes
    return found


def _axes(groups: tuple[tuple[int, ...], ...], mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Return the fewest axes of a mesh along which the ranks of each group differ; all axes without groups."""
    axes = tuple(axis for axis in mesh if mesh[axis] > 1)
    if not groups:
        return axes
    places = {rank: np.unravel_index(rank, list(mesh.values())) for rank in itertools.chain(*groups)}
    numbers = {axis: list(mesh).index(axis) for axis in axes}
    return tuple(
        axis for axis in axes if any(len({places[rank][numbers[axis]] for rank in group}) > 1 for group in groups)
    )


def _groups(line: str) -> tuple[tuple[int, ...], ...]:
    """Return the groups of ranks of an instruction; none if they are not named."""
    if listed := _LISTED.search(line):
        return tuple(tuple(int(n) for n in group.split(",")) for group in re.findall(r"\{([\d,]+)\}", listed[1]))
    if ranges := _RANGE.search(line):
        return tuple(map(tuple, _iota(ranges[1]).tolist()))
    if of_axes := _OF_AXES.search(line):
        # A mesh with names and sizes of axes, and those of a group last.
        sizes = {name: int(n) for name, n in re.findall(r"'(\w+)'=(\d+)", of_axes[1])}
        chosen = re.findall(r"'(\w+)'", of_axes[3])
        ids = _iota(of_axes[2]) if of_axes[2] else np.arange(math.prod(sizes.values()))
        order = [name for name in sizes if name not in chosen] + chosen
        ids = ids.reshape(list(sizes.values())).transpose([list(sizes).index(name) for name in order])
        return tuple(map(tuple, ids.reshape(-1, math.prod(sizes[name] for name in chosen)).tolist()))
    return ()


def _iota(text: str) -> np.ndarray:
    """Return consecutive numbers in a shape, such as ``[4,2]<=[2,4]T(1,0)``: shape, the shape that is transposed, and how; or a list."""
    if not text.startswith("["):
        return np.array([int(n) for n in text.split(",")])
    shape, _, source = text.rpartition("<=")
    counted, _, order = source.partition("T")
    sizes = [int(n) for n in re.findall(r"\d+", counted)]
    numbers = np.arange(math.prod(sizes)).reshape(sizes)
    numbers = numbers.transpose([int(n) for n in re.findall(r"\d+", order)]) if order else numbers
    return numbers.reshape([int(n) for n in re.findall(r"\d+", shape)]) if shape else numbers
