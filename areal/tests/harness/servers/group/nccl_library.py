"""The functions of NCCL without GPUs, which record their calls."""

from __future__ import annotations

from typing import Any

from areal.weight_sync import nccl

IN_PROGRESS, REMOTE_ERROR = 7, 6
ID = bytes(range(128))


class Function:
    """A function of the library. Its result is the next one of ``results``, or the last again."""

    def __init__(self, name: str, calls: list[tuple[Any, ...]], results: list[int]) -> None:
        self.name, self.calls, self.results = name, calls, results

    def __call__(self, *arguments: Any) -> int:
        self.calls.append((self.name, *arguments))
        if self.name == "ncclCommInitRankConfig":
            arguments[0]._obj.value = 4711
        result = self.results.pop(0) if len(self.results) > 1 else self.results[0]
        if self.name == "ncclCommGetAsyncError":
            arguments[1]._obj.value = result
            return 0
        return result


class Recorded:
    """A library without GPUs. ``results``: results of each function, 0 by default."""

    def __init__(self, **results: list[int]) -> None:
        self.calls: list[tuple[Any, ...]] = []
        for name in (*nccl._FUNCTIONS, *nccl._LATER_FUNCTIONS):
            setattr(self, name, Function(name, self.calls, results.get(name, [0])))

        def describe(result: int) -> bytes:
            return {REMOTE_ERROR: b"remote process exited or there was a network error"}.get(result, b"invalid usage")

        self.ncclGetErrorString = describe

    def names(self) -> list[str]:
        return [name for name, *_ in self.calls if name != "ncclCommGetAsyncError"]


class Stream:
    """A stream that is idle after ``polls`` queries."""

    cuda_stream = 99

    def __init__(self, polls: int = 0) -> None:
        self.polls = polls

    def query(self) -> bool:
        self.polls -= 1
        return self.polls < 0
