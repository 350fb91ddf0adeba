"""Operations whose results selective activation checkpointing does not keep, although it keeps those of other matrix products."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Active(threading.local):
    """Whether this thread is inside of :func:`always_recomputed`."""

    value = False


_active = _Active()


@contextmanager
def always_recomputed() -> Iterator[None]:
    """Context or decorator of operations that selective checkpointing computes again in the backward.

    For products with all logits, whose memory is quadratic in the length. The forward of a layer and its recomputation must enter it for the
    same operations.
    """
    before, _active.value = _active.value, True
    try:
        yield
    finally:
        _active.value = before


def is_always_recomputed() -> bool:
    """Return whether this thread is inside of :func:`always_recomputed`."""
    return _active.value
