"""Streams of tensors: in parts that the executor sends, and left early by the caller or by the garbage collector in another call."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest

from areal.api import FinetuneSpec
from areal.dispatch import WorkerGroup
from areal.dispatch.executor import InProcess, Reply, Work
from areal.tests.harness.limits import promptly, wait_until
from areal.tests.harness.tiny import config


class Locked(InProcess):
    """Ranks behind a lock, as those of Ray.

    Attributes:
        collects: run the garbage collector in the next call, with the lock.
    """

    in_driver = False

    def __init__(self) -> None:
        super().__init__()
        self._lock, self.collects = threading.Lock(), False

    def start(self, what: str, work: Work, arguments: Sequence[Any]) -> Future[list[Reply]]:
        """Implement the protocol."""
        with self._lock:
            if self.collects:
                self.collects = False
                gc.collect()
            return super().start(what, work, arguments)

    def streams(self) -> list[str]:
        """Return the streams that the rank holds."""
        return [name for name in self._objects.by_name if "/stream/" in name]


@contextmanager
def initialized() -> Iterator[WorkerGroup]:
    """Yield a group of one rank, whose streams come tensor by tensor."""
    with mock.patch("areal.dispatch.calls.STREAM_BYTES", 1), WorkerGroup(config("fsdp:d1"), Locked()) as group:
        group.initialize(FinetuneSpec(total_train_steps=10))
        yield group


class Limited(InProcess):
    """A rank whose replies have at most these bytes of tensors."""

    in_driver = False
    max_result_bytes = 20_000

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[int] = []

    def start(self, what: str, work: Work, arguments: Sequence[Any]) -> Future[list[Reply]]:
        """Implement the protocol."""
        replies = super().start(what, work, arguments)
        value = replies.result()[0].value
        if what == "named_tensors" and value is not None:
            self.parts.append(sum(tensor.nbytes for _, tensor in value[0]))
        return replies


@pytest.mark.world(1)
def test_parts_of_a_stream_are_below_the_limit_of_results() -> None:
    with WorkerGroup(config("fsdp:d1"), Limited()) as group:
        group.initialize(FinetuneSpec(total_train_steps=10))
        sizes = [tensor.nbytes for _, tensor in group.named_tensors()]
        executor: Any = group._executor
        assert sum(executor.parts) == sum(sizes) > Limited.max_result_bytes
        # The largest tensor has more than half, and comes alone.
        assert Limited.max_result_bytes / 2 < max(sizes) == max(executor.parts) <= Limited.max_result_bytes
        assert len(executor.parts) < len(sizes)


@pytest.mark.world(1)
def test_stream_in_a_reference_cycle_does_not_stop_the_driver() -> None:
    with initialized() as group:
        leave_a_stream_in_a_cycle(group)


def leave_a_stream_in_a_cycle(group: WorkerGroup) -> None:
    executor: Any = group._executor

    def fail() -> None:
        stream = group.named_tensors()  # which the frame holds
        for _ in stream:
            raise ConnectionError("the server is away")

    gc.disable()
    try:
        try:
            fail()
        except ConnectionError as error:
            error.itself = error  # type: ignore[attr-defined]  # the traceback holds the stream
        assert len(executor.streams()) == 1
        executor.collects = True
        with promptly():
            group.set_lr(1e-3)
        wait_until(lambda: not executor.streams(), "the stream is closed on the rank")
    finally:
        gc.enable()


@pytest.mark.world(1)
def test_stream_that_is_left_early_or_never_read_is_closed_on_the_ranks() -> None:
    with initialized() as group:
        leave_streams(group)


def leave_streams(group: WorkerGroup) -> None:
    executor: Any = group._executor
    read, unread = group.named_tensors(), group.named_tensors()
    next(read)
    assert len(executor.streams()) == 2
    read.close()  # type: ignore[attr-defined]
    assert len(executor.streams()) == 1
    assert list(read) == []
    del unread
    wait_until(lambda: not executor.streams(), "the other stream is closed, too")
    assert len(list(group.named_tensors())) > 4
    assert not executor.streams()
