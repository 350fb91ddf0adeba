"""Reductions of gradients that a rank begins."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup


@contextmanager
def begun_reductions() -> Iterator[list[Any]]:
    """Record the buckets whose reductions this rank begins, in order."""
    kind, order = _ParamAndGradBucketGroup, []
    original = kind.start_grad_sync

    def recording(self: Any, *args: Any, **options: Any) -> None:
        if self.grad_reduce_handle is None:
            order.append(self)
        original(self, *args, **options)

    kind.start_grad_sync = recording
    try:
        yield order
    finally:
        kind.start_grad_sync = original
