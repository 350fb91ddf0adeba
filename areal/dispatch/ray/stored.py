"""Values that go to the ranks: shards of a batch, functions, and results of other ranks. The object store of Ray has those that are large."""

from __future__ import annotations

import hashlib
import pickle
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import ray
from ray import ObjectRef

from areal.dispatch.executor import Handle
from areal.dispatch.ray.results import seal_batch, unseal

V = TypeVar("V")

FUNCTIONS = 32
"""Functions that the driver and each rank keep. Of more, the one that was not used for the longest time is sent again."""


PUT_BYTES = 160 * 2**10
"""Bytes that cost the driver as much CPU time in a call as it takes to store an object."""

REFERENCE_BYTES = 32 * 2**10
"""The same for a reference in place of a value, with the questions of the rank that reads the object."""

NESTED_BYTES = 4 * 2**10
"""The same for each reference in a value that consists of references."""

LARGEST_INLINE = 64 * 2**10
"""Bytes of a value in a call, at most. Ray stores each argument above 100 KiB by itself, for each rank again."""


def by_reference(nbytes: int, *, readers: int, references: int = 0) -> bool:
    """Return whether a value is stored once, and does not travel in each of the calls that need it.

    Args:
        nbytes: bytes of its pickle without the references.
        readers: number of ranks that get the value in one call.
        references: number of references to the store in it.
    """
    cost = nbytes + NESTED_BYTES * references
    return nbytes > LARGEST_INLINE or readers * cost > PUT_BYTES + cost + readers * REFERENCE_BYTES


class Recent(Generic[V]):
    """The most recently used values, by key. May be used by several threads.

    Args:
        number: values to keep.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._values: OrderedDict[str, V] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: str) -> V | None:
        """Return a value, or ``None``."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def keep(self, key: str, value: V) -> V:
        """Keep a value and return it."""
        with self._lock:
            self._values[key] = value
            self._values.move_to_end(key)
            while len(self._values) > self._number:
                self._values.popitem(last=False)
        return value


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """A batch in the object store. Processes of one node read the same memory and copy it."""

    ref: ObjectRef

    def get(self) -> Any:
        return unseal(ray.get(self.ref))


@dataclass(frozen=True, slots=True)
class StoredResult:
    """The result of a rank, as it has replied it."""

    ref: ObjectRef

    def get(self) -> Any:
        return unseal(ray.get(self.ref).value)


@dataclass(frozen=True, slots=True)
class SmallBatch:
    """A batch as bytes, which were made once for all ranks."""

    data: bytes

    def get(self) -> Any:
        return unseal(pickle.loads(self.data))


@dataclass(frozen=True, slots=True)
class StoredHandle:
    """A handle in the object store, for all ranks of a data-parallel coordinate."""

    ref: ObjectRef

    def get(self) -> Any:
        return ray.get(self.ref).get()


_loaded: Recent[tuple[Any]] = Recent(FUNCTIONS)
"""Functions of this process, by digest: one that is sent again is not loaded again."""


@dataclass(frozen=True, slots=True)
class StoredFunction:
    """A function in the object store.

    Attributes:
        digest: hash of the bytes.
        ref: bytes of cloudpickle.
    """

    digest: str
    ref: ObjectRef

    def get(self) -> Any:
        loaded = _loaded.get(self.digest)
        if loaded is None:
            loaded = _loaded.keep(self.digest, (ray.cloudpickle.loads(ray.get(self.ref)),))
        return loaded[0]


class Store:
    """Puts values of the driver into the object store, and counts.

    Attributes:
        batches: batches put so far.
        functions: functions put so far.
    """

    def __init__(self) -> None:
        self.batches = self.functions = 0
        self._sent: Recent[StoredFunction] = Recent(FUNCTIONS)
        self._lock = threading.Lock()

    def put(self, value: Any, *, keep: bool = False, readers: int = 1) -> Handle:
        """Store a batch, once for all ranks that get the handle.

        Args:
            value: the batch.
            keep: many calls get the handle: the value does not travel in them, however small it is.
            readers: number of ranks that get the handle.

        Raises:
            ValueError: the batch cannot be sent.
        """
        sealed = seal_batch(value)
        stored = keep or by_reference(sealed.nbytes + len(sealed.value), readers=readers)
        handle: Handle = StoredBatch(ray.put(sealed)) if stored else SmallBatch(pickle.dumps(sealed))
        with self._lock:
            self.batches += 1
        return handle

    def share(self, handle: Handle, nbytes: int, references: int, readers: int) -> Handle:
        """Implement :meth:`areal.dispatch.executor.Executor.share`."""
        # Ray itself pickles the handle: it keeps the objects that a stored one refers to.
        stored = by_reference(nbytes, readers=readers, references=references)
        return StoredHandle(ray.put(handle)) if stored else handle

    def ship(self, function: Any, what: str, check: Callable[[Handle], str]) -> Handle:
        """Store a function, unless it is stored already.

        Args:
            function: any object.
            what: name of the argument, for the error.
            check: loads a function on a rank, and returns the error or an empty string. Called once for each function.

        Raises:
            ValueError: the function cannot be sent.
        """
        try:
            code = ray.cloudpickle.dumps(function)
        except Exception as error:
            raise ValueError(
                f"{what} = {_name(function)} cannot be sent to the ranks: {error}: pass what it needs as values, or make that (a lock, a file, "
                "a connection) inside the function, or in a function of run(fn) that makes it on the ranks"
            ) from error
        # Functions with the same bytes are the same: also a lambda that is written in a loop.
        digest = hashlib.sha256(code).hexdigest()
        handle = self._sent.get(digest)
        if handle is not None:
            return handle
        handle = StoredFunction(digest, ray.put(code))
        with self._lock:
            self.functions += 1
        failure = check(handle)
        if failure:
            raise ValueError(
                f"{what} = {_name(function)} cannot be loaded on the ranks: {failure}: use ray.cloudpickle.register_pickle_by_value(module) of "
                "a module that only the driver can import, submit the job with working_dir or py_modules, install the module on all nodes, or "
                "make the object in a function of run(fn)"
            )
        return self._sent.keep(digest, handle)


def _name(function: Any) -> str:
    """Return the name of a function, and of its module."""
    name = getattr(function, "__qualname__", None)
    return repr(function) if name is None else f"{getattr(function, '__module__', '?')}.{name}"
