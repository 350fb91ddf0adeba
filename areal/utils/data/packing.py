"""Bin packing: which sequences share a micro-batch."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

_WORTH = 16
"""Neighbours stay together if they share at least one in so many of their tokens."""


def pack(lengths: Sequence[int], budget: int | None, *, min_bins: int = 1, align: int = 1) -> list[list[int]]:
    """Partition positions ``0 .. n-1`` into bins whose lengths add up to no more than a budget.

    First-fit-decreasing (Johnson, 1973) in ``O(n log n)``. Where that leaves fewer bins than asked for, the same
    lengths are spread evenly over more. The same input gives the same bins.

    Args:
        lengths: tokens of each sequence, each at least 1.
        budget: tokens of a bin after its sum is rounded up to ``align``; ``None`` makes ``min_bins`` balanced bins.
        min_bins: least number of bins; with fewer lengths than this, each has a bin of its own.
        align: what the sum of a bin is rounded up to a multiple of.

    Returns:
        Bins that are not empty, of positions in ascending order; each position is in exactly one.

    Raises:
        ValueError: a length is above the budget or below 1, or an argument is out of range.
    """
    if min_bins < 1 or align < 1:
        raise ValueError(f"pack got min_bins = {min_bins} and align = {align}: both are at least 1")
    if any(length < 1 for length in lengths):
        bad = next(i for i, length in enumerate(lengths) if length < 1)
        raise ValueError(f"lengths[{bad}] = {lengths[bad]}: a sequence has at least 1 token; leave empty ones out")
    wanted = min(min_bins, len(lengths))
    if budget is None:
        return _spread(range(len(lengths)), lengths, wanted)
    # A sum rounds up to no more than the budget exactly when it is no more than the budget rounded down.
    capacity = budget // align * align
    if any(length > capacity for length in lengths):
        bad = next(i for i, length in enumerate(lengths) if length > capacity)
        raise ValueError(
            f"lengths[{bad}] = {lengths[bad]} does not fit the budget of {budget} tokens (aligned to {align}: "
            f"{capacity}): raise the budget, or shorten the sequence"
        )
    bins = _first_fit_decreasing(lengths, capacity)
    return bins if len(bins) >= wanted else _split(bins, lengths, capacity, wanted)


def pack_sharing(
    lengths: Sequence[int], shared: Sequence[int], budget: int | None, *, min_bins: int = 1, align: int = 1
) -> list[list[int]]:
    """The same, where neighbours have tokens in common that a bin with both holds once.

    Neighbours that share much stay together as long as they fit; such pieces are then packed like sequences.

    Args:
        lengths: tokens of each sequence.
        shared: how many of them the sequence before has too; fewer than ``lengths``, or as many.

    Returns:
        As :func:`pack`. What a bin holds, shared tokens counted once, is no more than the budget.
    """
    most = budget // align * align if budget is not None else -(-(sum(lengths) - sum(shared[1:])) // min_bins)
    pieces: list[list[int]] = []
    size = 0
    for i, (length, common) in enumerate(zip(lengths, shared, strict=True)):
        if pieces and common * _WORTH >= length and size + length - common <= most:
            pieces[-1].append(i)
            size += length - common
        else:
            pieces.append([i])
            size = length
    while len(pieces) < min(min_bins, len(lengths)):
        longest = max(range(len(pieces)), key=lambda k: len(pieces[k]))
        members = pieces[longest]
        pieces[longest : longest + 1] = [members[: len(members) // 2], members[len(members) // 2 :]]
    sizes = [sum(lengths[i] for i in piece) - sum(shared[i] for i in piece[1:]) for piece in pieces]
    packed = pack(sizes, budget, min_bins=min_bins, align=align)
    return [sorted(i for k in members for i in pieces[k]) for members in packed]


def deal(costs: Sequence[float], n: int) -> list[list[int]]:
    """Partition positions ``0 .. len(costs) - 1`` into ``n`` shares of about the same cost: what each of ``n`` ranks gets of a batch.

    Longest processing time first (Graham, 1969): the dearest share costs at most a third more than the best partition's. No share
    is empty where there are ``n`` positions. The same input gives the same shares.

    Args:
        costs: of each sample, such as :func:`sequence_cost`; any unit, above 0.

    Raises:
        ValueError: a cost is not above 0, or ``n`` is below 1.
    """
    bad = next((i for i, cost in enumerate(costs) if not 0 < cost < math.inf), None)
    if bad is not None:
        raise ValueError(f"costs[{bad}] = {costs[bad]}: a cost is finite and above 0; drop samples that cost nothing")
    if n < 1:
        raise ValueError(f"n = {n}: deal to at least 1 rank")
    return _spread(range(len(costs)), costs, n)


def sequence_cost(length: int, attention: float) -> float:
    """What a sequence costs to train on, in tokens of a short one: ``length + attention * length ** 2``.

    Args:
        attention: what one more key costs a token, over what the matrix products cost it: ``layers * heads * head_dim`` over the
            parameters that multiply every token (a causal token sees half of its sequence, and attention has two products for each
            key where a parameter has one).
    """
    return length + attention * length**2


def _first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    # A tree of maxima over the free space of all possible bins. Those not yet opened lie to the right with all their
    # capacity, so the leftmost bin with room always exists and is found in one descent.
    n = len(lengths)
    size = 1 << max(0, n - 1).bit_length()
    free = [capacity] * (2 * size)
    bins: list[list[int]] = [[] for _ in range(n)]
    for i in _longest_first(range(n), lengths):
        length = lengths[i]
        node = 1
        while node < size:
            node *= 2
            if free[node] < length:
                node += 1
        bins[node - size].append(i)
        free[node] -= length
        while node > 1:
            node //= 2
            most = max(free[2 * node], free[2 * node + 1])
            if free[node] == most:
                break
            free[node] = most
    return [sorted(members) for members in bins if members]


def _longest_first(members: Sequence[int], lengths: Sequence[float]) -> list[int]:
    return sorted(members, key=lambda i: (-lengths[i], i))


def _spread(members: Sequence[int], lengths: Sequence[float], n_bins: int) -> list[list[int]]:
    """Longest processing time first (Graham, 1969): the next longest goes where least is."""
    bins: list[list[int]] = [[] for _ in range(n_bins)]
    loads: list[tuple[float, int]] = [(0, b) for b in range(n_bins)]
    for i in _longest_first(members, lengths):
        load, b = loads[0]
        bins[b].append(i)
        heapq.heapreplace(loads, (load + lengths[i], b))
    return [sorted(members) for members in bins]


def _split(bins: list[list[int]], lengths: Sequence[int], capacity: int, wanted: int) -> list[list[int]]:
    even = _spread(range(len(lengths)), lengths, wanted)
    if all(sum(lengths[i] for i in members) <= capacity for members in even):
        return even
    # Spreading anew does not know the capacity. Halving bins that keep it does, whatever the lengths are.
    heap = [(-sum(lengths[i] for i in members), members) for members in bins if len(members) > 1]
    done = [members for members in bins if len(members) == 1]
    heapq.heapify(heap)
    while len(heap) + len(done) < wanted:
        _, members = heapq.heappop(heap)
        for half in _spread(members, lengths, 2):
            if len(half) > 1:
                heapq.heappush(heap, (-sum(lengths[i] for i in half), half))
            else:
                done.append(half)
    return sorted(done + [members for _, members in heap])
