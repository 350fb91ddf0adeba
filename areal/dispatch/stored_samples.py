"""Samples whose tensors are in the executor's store: put once, and taken by reference by the verbs of all groups."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from torch import Tensor

from areal.api.engine import BatchInput
from areal.dispatch.executor import Executor, Handle

S = TypeVar("S", bound=Mapping[str, Any])

Keys = tuple[str, ...]

PIECE_BYTES = 2**20
"""Bytes after which a piece of the store ends. A rank reads complete pieces. Putting one costs as much as copying about so many bytes."""


class CallResults:
    """The results of one call, which stay where they were computed until the processes are replaced.

    Args:
        executor: executor of the call, before it starts.

    Attributes:
        kind: kind of the executor.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor, self._generation, self.kind = weakref.ref(executor), executor.generation, type(executor)

    @property
    def remain(self) -> bool:
        """True if no process that may hold them was lost."""
        executor = self._executor()
        return executor is not None and executor.lost is None and executor.generation == self._generation


@dataclass(frozen=True)
class StorePlace:
    """Place of a tensor in the store.

    Attributes:
        tensor: the tensor, while the driver has it.
        version: counter of its changes in place, when it was stored.
        handle: refers to the piece: a list of dicts.
        row, key: index of the dict, and key in it.
        executor: kind of the executors that can read the handle.
        results: those of the call that has computed the tensor; ``None`` for one that the driver has put.
    """

    tensor: weakref.ref[Tensor]
    version: int
    handle: Handle
    row: int
    key: str
    executor: type
    results: CallResults | None = None

    def has(self, value: Tensor, executor: Executor) -> bool:
        """Return whether ranks of an executor find this tensor here, with its present numbers."""
        return (
            self.tensor() is value
            and self.version == _version(value)
            and type(executor) is self.executor
            and (self.results is None or self.results.remain)
        )


class StoredSample(dict[str, Any]):
    """A sample that knows which of its tensors are in the store. So does its copy with further keys, ``sample | {...}``.

    Attributes:
        places: place of a tensor, by its id.
    """

    __slots__ = ("places",)

    def __init__(self, values: Mapping[str, Any], places: dict[int, StorePlace]) -> None:
        super().__init__(values)
        self.places = places

    def __or__(self, other: Mapping[str, Any]) -> StoredSample:  # type: ignore[override]
        return StoredSample({**self, **other}, self.places)

    def __reduce__(self) -> tuple[Any, ...]:
        # Other processes receive the values.
        return dict, (dict(self),)

    def place_of(self, value: Any, executor: Executor) -> StorePlace | None:
        """Return the place of one of the values for the ranks of an executor; ``None`` if it has to be sent."""
        place = self.places.get(id(value))
        return place if place is not None and place.has(value, executor) else None

    def keep(self, value: Tensor, **place: Any) -> None:
        """Note the place of a tensor, and forget those of tensors that the driver does not have any more.

        Tensors of the inference mode do not count their changes in place. They have no place, and are sent with each call.
        """
        if value.is_inference():
            return
        if len(self.places) > 2 * len(self):
            for key, other in list(self.places.items()):
                if other.tensor() is None:
                    self.places.pop(key, None)
        self.places[id(value)] = StorePlace(weakref.ref(value), _version(value), **place)


def _version(x: Tensor) -> int:
    """Return the counter of changes in place."""
    return x._version


# ---- in the driver


def put_samples(samples: list[S], executor: Executor) -> list[S]:
    """Return the samples with all their tensors in the store. Those that are there already are not put again.

    Tensors of the inference mode are not put: they travel with each call. A rank in this process reads the samples themselves.

    Raises:
        ValueError: the batch is not a list of samples, or cannot be sent.
    """
    wrong = (
        [f" with a {type(x).__name__}" for x in samples if not isinstance(x, Mapping)]
        if isinstance(samples, list)
        else [""]
    )
    if wrong:
        raise ValueError(f"samples is a {type(samples).__name__}{wrong[0]}: pass a list with one dict for each sample")
    if executor.in_driver:
        return samples
    # Samples that were put before keep their places, of which later puts add more.
    stored = [sample if isinstance(sample, StoredSample) else StoredSample(sample, {}) for sample in samples]
    for piece in _pieces(stored, executor):
        handle = executor.put([values for _, values in piece], keep=True)
        for row, (sample, values) in enumerate(piece):
            for key, value in values.items():
                sample.keep(value, handle=handle, row=row, key=key, executor=type(executor))
    return cast("list[S]", stored)


def _pieces(
    samples: Sequence[StoredSample], executor: Executor
) -> Iterator[list[tuple[StoredSample, dict[str, Tensor]]]]:
    """Yield consecutive samples, each with its tensors that are not stored, in pieces of about :data:`PIECE_BYTES`."""
    piece: list[tuple[StoredSample, dict[str, Tensor]]] = []
    nbytes = 0
    for sample in samples:
        missing = {
            key: value
            for key, value in sample.items()
            if isinstance(value, Tensor) and not value.is_inference() and sample.place_of(value, executor) is None
        }
        if missing:
            piece.append((sample, missing))
            nbytes += sum(value.nbytes for value in missing.values())
        if nbytes >= PIECE_BYTES:
            yield piece
            piece, nbytes = [], 0
    if piece:
        yield piece


def put_shard(shard: BatchInput, executor: Executor, readers: int) -> Handle:
    """Return the handle of a shard. Tensors of stored samples are read from the store, and everything else travels with the call.

    Args:
        shard: samples of one data-parallel coordinate.
        executor: executor of the call.
        readers: number of ranks of the coordinate.
    """
    # What is no batch is refused on the ranks.
    if not isinstance(shard, Sequence) or not any(isinstance(sample, StoredSample) for sample in shard):
        return executor.put(shard, readers=readers)
    handles: dict[int, Handle] = {}
    taken: dict[tuple[int, Keys, Keys], tuple[list[int], list[int]]] = {}
    others: list[dict[str, Any]] = []
    for position, sample in enumerate(shard):
        # The keys of the sample by dict of the store, and those that are in none.
        by_row: dict[tuple[int, int], list[tuple[str, str]]] = {}
        others.append({})
        for key, value in sample.items():
            place = sample.place_of(value, executor) if isinstance(sample, StoredSample) else None
            if place is None:
                others[-1][key] = value
            else:
                handles[id(place.handle)] = place.handle
                by_row.setdefault((id(place.handle), place.row), []).append((key, place.key))
        # Samples that take the same keys of a piece are one entry.
        for (number, row), pairs in by_row.items():
            keys, stored_keys = zip(*pairs, strict=True)
            positions, rows = taken.setdefault((number, keys, stored_keys), ([], []))
            positions.append(position)
            rows.append(row)
    numbers = {number: index for index, number in enumerate(handles)}
    # Equal tuples become one, which is pickled once.
    once: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    keys_of = [once.setdefault(keys, keys) for keys in map(tuple, shard)]
    pieces = [
        (numbers[number], *(once.setdefault(each, each) for each in (keys, stored_keys, *map(tuple, places))))
        for (number, keys, stored_keys), places in taken.items()
    ]
    plan = pickle.dumps((keys_of, pieces))
    rest = executor.put(others, readers=readers) if any(others) else None
    return executor.share(StoredShard((*handles.values(),), plan, rest), len(plan), len(handles), readers)


def keep_results(
    batch: BatchInput,
    indices: Sequence[Sequence[int]],
    handles: Sequence[Handle | None],
    result: Any,
    call: CallResults,
) -> None:
    """Note where the results of stored samples are, so that a sample that gets one as a key refers to it.

    Args:
        batch: batch of the call.
        indices: samples of each coordinate.
        handles: refer to the results of each coordinate; ``None`` for those that no other process can read.
        result: results by sample: a list of tensors, or a dict of these.
        call: the call that has computed them.
    """
    if isinstance(batch, Mapping):
        return
    # Row k of a coordinate's result is of the k-th of its samples. Results that are no tensors are not noted.
    for name, values in (result if isinstance(result, dict) else {"": result}).items():
        for members, handle in zip(indices, handles, strict=True):
            column = None if handle is None else ResultColumn(handle, name)
            for row, i in enumerate(members if column is not None and isinstance(values, list) else ()):
                sample, value = batch[i], values[i]
                if isinstance(sample, StoredSample) and isinstance(value, Tensor):
                    sample.keep(value, handle=column, row=row, key=name, executor=call.kind, results=call)


# ---- in the process of a rank


@dataclass(frozen=True, slots=True)
class StoredShard:
    """A shard of stored samples, which :meth:`get` puts together.

    Attributes:
        handles: refer to the pieces that have tensors of the shard.
        plan: the keys of each sample; and for several samples that take the same keys of a piece, its index among the handles, the keys, those
            of the piece, the positions of the samples and their rows in the piece. Pickled once for all ranks.
        rest: values that are not in the store, by sample; ``None`` if there are none.
    """

    handles: tuple[Handle, ...]
    plan: bytes
    rest: Handle | None

    def get(self) -> list[dict[str, Any]]:
        keys_of, pieces = pickle.loads(self.plan)
        values = [handle.get() for handle in self.handles]
        # Keys in the driver's order.
        samples: list[dict[str, Any]] = [dict.fromkeys(keys) for keys in keys_of]
        for number, keys, stored_keys, positions, rows in pieces:
            for position, row in zip(positions, rows, strict=True):
                for key, stored in zip(keys, stored_keys, strict=True):
                    samples[position][key] = values[number][row][stored]
        if self.rest is not None:
            for sample, others in zip(samples, self.rest.get(), strict=True):
                sample.update(others)
        return samples


@dataclass(frozen=True, slots=True)
class ResultColumn:
    """One output of the result of a rank, as a piece.

    Attributes:
        result: refers to a list of tensors, or a dict of these.
        name: key in the dict; empty if there is only the list.
    """

    result: Handle
    name: str

    def get(self) -> list[dict[str, Tensor]]:
        value = self.result.get()
        return [{self.name: each} for each in (value[self.name] if self.name else value)]
