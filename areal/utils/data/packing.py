"""Bin packing: assign sequences to micro-batches, and samples to ranks."""

from __future__ import annotations

import heapq
import math
from bisect import bisect
from collections.abc import Sequence
from itertools import accumulate, pairwise

_MIN_SHARED_FRACTION = 1 / 16
"""Neighbours are kept in one bin if at least this fraction of their tokens is shared."""


def pack(lengths: Sequence[int], budget: int | None, *, min_bins: int = 1, align: int = 1) -> list[list[int]]:
    """Partition indices ``0 .. n-1`` into bins, so that the sum of lengths of each bin is within a budget.

    First-fit-decreasing (Johnson, 1973) in ``O(n log n)``. If that results in fewer bins than ``min_bins``, the lengths are
    spread evenly over more bins. Deterministic.

    Args:
        lengths: number of tokens of each sequence, at least 1.
        budget: upper bound of a bin's sum, rounded up to ``align``. ``None``: ``min_bins`` balanced bins.
        min_bins: smallest number of bins. With fewer sequences, each sequence has a separate bin.
        align: the sum of a bin is rounded up to a multiple of this.

    Returns:
        Non-empty bins of indices in ascending order. Each index is in exactly one bin.

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
    # As few bins as possible, then more if they are wanted.
    bins = _first_fit_decreasing(lengths, capacity)
    return bins if len(bins) >= wanted else _split(bins, lengths, capacity, wanted)


def pack_sharing(
    lengths: Sequence[int], shared: Sequence[int], budget: int | None, *, min_bins: int = 1, align: int = 1
) -> list[list[int]]:
    """Pack sequences with common prefixes: tokens that neighbours share count once in a bin with both.

    Neighbours with long common prefixes are joined to runs, up to the budget. Runs are then packed like sequences.

    Args:
        lengths: number of tokens of each sequence, in lexicographic order of the sequences.
        shared: number of tokens that each sequence shares with the sequence before it, at most its length.
        budget, min_bins, align: see :func:`pack`.

    Returns:
        Bins, see :func:`pack`. The sum of a bin, with shared tokens counted once, is within the budget.
    """
    # Capacity of a run. Without a budget: an even division of all tokens over the bins.
    most = budget // align * align if budget is not None else -(-(sum(lengths) - sum(shared[1:])) // min_bins)
    runs: list[list[int]] = []
    size = 0
    for i, (length, common) in enumerate(zip(lengths, shared, strict=True)):
        # Join the run before, if enough is shared and the sum stays within the capacity.
        if runs and common >= length * _MIN_SHARED_FRACTION and size + length - common <= most:
            runs[-1].append(i)
            size += length - common
        else:
            runs.append([i])
            size = length
    # Split the longest runs until there are enough for all bins.
    while len(runs) < min(min_bins, len(lengths)):
        longest = max(range(len(runs)), key=lambda k: len(runs[k]))
        members = runs[longest]
        runs[longest : longest + 1] = [members[: len(members) // 2], members[len(members) // 2 :]]
    sizes = [sum(lengths[i] for i in run) - sum(shared[i] for i in run[1:]) for run in runs]
    # Pack the runs, and return their sequences.
    packed = pack(sizes, budget, min_bins=min_bins, align=align)
    return [sorted(i for k in members for i in runs[k]) for members in packed]


def deal(costs: Sequence[float], n: int) -> list[list[int]]:
    """Partition indices ``0 .. len(costs) - 1`` into ``n`` lists of similar cost, one for each of ``n`` ranks.

    Longest processing time first (Graham, 1969): the largest cost is at most 4/3 of that of the best partition. With at least
    ``n`` indices, no list is empty. Deterministic.

    Args:
        costs: cost of each sample in any unit, such as :func:`sequence_cost`. Finite and above 0.
        n: number of ranks.

    Raises:
        ValueError: a cost is not above 0, or ``n`` is below 1.
    """
    bad = next((i for i, cost in enumerate(costs) if not 0 < cost < math.inf), None)
    if bad is not None:
        raise ValueError(f"costs[{bad}] = {costs[bad]}: a cost is finite and above 0; drop samples that cost nothing")
    if n < 1:
        raise ValueError(f"n = {n}: deal to at least 1 rank")
    return _spread(range(len(costs)), costs, n)


def deal_sharing(costs: Sequence[float], shared: Sequence[float], n: int) -> list[list[int]]:
    """Deal sequences with common prefixes: what neighbours share costs once on a rank with both.

    Neighbours with long common prefixes form a family. A family that costs more than ``1/n`` of all is divided where its
    members share least, until each part costs less or is one sequence. Then the most expensive part goes to the rank that has
    the smallest cost with it, and so on. Deterministic.

    Args:
        costs: cost of each sequence, in lexicographic order of the sequences; see :func:`deal`.
        shared: cost of what each sequence shares with the sequence before it, at most its cost.
        n: number of ranks.

    Returns:
        Lists of indices in ascending order, one for each rank.
    """
    # Links between neighbours; 0 where a family begins. Families are numbered, so that few pairs of parts have to be compared.
    joined = [
        k > 0 and common >= cost * _MIN_SHARED_FRACTION
        for k, (cost, common) in enumerate(zip(costs, shared, strict=True))
    ]
    links = [common if join else 0.0 for common, join in zip(shared, joined, strict=True)]
    family = list(accumulate(0 if join else 1 for join in joined))
    parts = _divide(costs, links, (sum(costs) - sum(links)) / n)

    def saved(part: tuple[int, int], there: list[tuple[int, int]]) -> float:
        """Return the cost of what a part shares with the parts of a rank: those that are its neighbours there share most."""
        at = bisect(there, part)
        pairs = [(there[at - 1], part)] if at else []
        pairs += [(part, there[at])] if at < len(there) else []
        return max((min(links[a[1] : b[0] + 1]) for a, b in pairs if family[a[0]] == family[b[0]]), default=0.0)

    loads, held = [0.0] * n, [list[tuple[int, int]]() for _ in range(n)]
    for cost, part in sorted(parts, key=lambda each: (-each[0], each[1])):
        load, rank = min((loads[rank] + cost - saved(part, held[rank]), rank) for rank in range(n))
        loads[rank] = load
        held[rank].insert(bisect(held[rank], part), part)
    return [[k for start, end in there for k in range(start, end)] for there in held]


def sequence_cost(length: int, attention: float) -> float:
    """Return the cost of training on a sequence, in tokens of a short sequence: ``length + attention * length ** 2``.

    Args:
        length: number of tokens.
        attention: cost of one key per token, relative to the cost of all matrix products per token. Estimate it as
            ``layers * heads * head_dim`` divided by the number of parameters that multiply every token. (A causal token sees
            half of its sequence, and attention has two products per key; a parameter has one per token.)
    """
    return length + attention * length**2


def _first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Put each length, longest first, into the first bin with enough space."""
    # A segment tree with the maximum of the free space of all n possible bins. Unopened bins are on the right, with full
    # capacity. So the leftmost bin with enough space always exists, and one descent finds it.
    n = len(lengths)
    size = 1 << max(0, n - 1).bit_length()
    free = [capacity] * (2 * size)
    bins: list[list[int]] = [[] for _ in range(n)]
    for i in _longest_first(range(n), lengths):
        length = lengths[i]
        # Descend: to the left child if its maximum is large enough, else to the right child.
        node = 1
        while node < size:
            node *= 2
            if free[node] < length:
                node += 1
        bins[node - size].append(i)
        # Update the maxima on the way up, until one does not change.
        free[node] -= length
        while node > 1:
            node //= 2
            most = max(free[2 * node], free[2 * node + 1])
            if free[node] == most:
                break
            free[node] = most
    return [sorted(members) for members in bins if members]


def _divide(costs: Sequence[float], links: Sequence[float], most: float) -> list[tuple[float, tuple[int, int]]]:
    """Divide a row of sequences at its weakest links, until each part costs at most ``most`` or is one sequence.

    Returns:
        Cost, begin and end of each part.
    """
    parts: list[tuple[float, tuple[int, int]]] = []
    pending = [(0, len(costs))] if costs else []
    while pending:
        start, end = pending.pop()
        inner = links[start + 1 : end]
        cost = sum(costs[start:end]) - sum(inner)
        weakest = min(inner, default=math.inf)
        # A link of 0 is none: a part is of one family.
        if end - start == 1 or (weakest > 0 and cost <= most):
            parts.append((cost, (start, end)))
        else:
            pending += pairwise([start, *(k for k in range(start + 1, end) if links[k] == weakest), end])
    return parts


def _longest_first(members: Sequence[int], lengths: Sequence[float]) -> list[int]:
    return sorted(members, key=lambda i: (-lengths[i], i))


def _spread(members: Sequence[int], lengths: Sequence[float], n_bins: int) -> list[list[int]]:
    """Put each length, longest first, into the bin with the smallest sum (Graham, 1969)."""
    # A heap of (sum, bin).
    bins: list[list[int]] = [[] for _ in range(n_bins)]
    loads: list[tuple[float, int]] = [(0, b) for b in range(n_bins)]
    for i in _longest_first(members, lengths):
        load, b = loads[0]
        bins[b].append(i)
        heapq.heapreplace(loads, (load + lengths[i], b))
    return [sorted(members) for members in bins]


def _split(bins: list[list[int]], lengths: Sequence[int], capacity: int, wanted: int) -> list[list[int]]:
    """Return at least ``wanted`` bins instead of fewer."""
    # Balanced bins, if they fit.
    even = _spread(range(len(lengths)), lengths, wanted)
    if all(sum(lengths[i] for i in members) <= capacity for members in even):
        return even
    # Otherwise split the largest bins in two. The result always fits, because the bins do.
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
