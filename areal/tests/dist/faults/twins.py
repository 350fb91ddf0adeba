"""Two equal engines of one world, one of which meets faults."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from torch import Tensor

from areal.api import Batch, TokenOutputs, TrainEngine
from areal.tests.harness.limits import promptly
from areal.tests.harness.tiny import (
    Sample,
    global_batch,
    local_batch,
    loss,
    same_bits,
    started,
    weights_of,
)
from areal.tests.harness.world import world

DISCARDED = "all pending gradients were discarded"


@contextmanager
def raised(kind: type[Exception], *says: str, guilty: int | None = None) -> Iterator[None]:
    """Expect this type of error, promptly, with this message and, in a larger world, the faulty rank."""
    with promptly(), pytest.raises((ValueError, RuntimeError)) as caught:
        yield
    text = str(caught.value)
    assert type(caught.value) is kind, f"{type(caught.value).__name__}: {text}"
    for words in says:
        assert words in text
    if guilty is not None and world().size > 1:
        assert f"rank {guilty}: " in text
        others = [rank for rank in range(world().size) if rank != guilty]
        assert not any(f"rank {rank}: " in text for rank in others), text


@dataclass(frozen=True)
class Twins:
    """Two equal engines in one world; only one of them meets the faults."""

    engine: TrainEngine
    untouched: TrainEngine

    @property
    def guilty(self) -> int:
        """Return the rank that causes the fault."""
        return world().size - 1

    @property
    def is_guilty(self) -> bool:
        """Return True on the rank that causes the fault."""
        return world().rank == self.guilty

    def batch(self, seed: int = 0) -> list[Sample]:
        """Return this rank's shard of a valid batch."""
        return local_batch(self.engine, global_batch(seed))

    def check(self) -> None:
        """Check that no gradients are pending and that the next step equals that of the other engine."""
        with pytest.raises(RuntimeError, match="no gradient is pending"):
            self.engine.named_gradients()
        actual, expected = (engine.train_batch(self.batch(), loss) for engine in (self.engine, self.untouched))
        assert (actual.loss, actual.grad_norm, actual.lr) == (expected.loss, expected.grad_norm, expected.lr)
        assert actual.update_successful

    def check_weights(self) -> None:
        """Check that both engines have the same weights."""
        assert same_bits(weights_of(self.engine), weights_of(self.untouched))


@contextmanager
def twins(backend: str, **changes: Any) -> Iterator[Twins]:
    with started(backend, **changes) as engine, started(backend, **changes) as untouched:
        pair = Twins(engine, untouched)
        # Without programs that are compiled in the call with the fault.
        if backend.startswith("jax"):
            engine.forward_backward(pair.batch(), loss)
            engine.forward_batch(pair.batch())
            engine.zero_grad()
        yield pair
        pair.check_weights()


def explode(*_: Any) -> Any:
    raise KeyError("no such column")


def infinite_slope(out: TokenOutputs, batch: Batch) -> Tensor:
    """Return a finite loss with a non-finite gradient: the root of 0."""
    return loss(out, batch) + (out.logprobs * 0).sum().sqrt()
