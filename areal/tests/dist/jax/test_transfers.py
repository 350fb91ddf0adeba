"""Transfers between host and device in a call of the JAX engine, and waits of the host.

JAX's own guard reports transfers to the device. It reports no read of a CPU's array, so these are counted in the class of arrays.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import jax
import pytest
from jax._src.array import ArrayImpl

from areal.api import MicroBatchSpec
from areal.tests.harness.tiny import family_dir, global_batch, local_batch, loss, started

MICRO_BATCHES = 3

INPUTS = 7
"""Arrays of a micro-batch: tokens, the three of their visibility, and places, targets and temperatures of the rows of the head."""


@dataclass
class Counted:
    """Transfers to the device, arrays read by the host, and waits of the host for programs without reading."""

    to_device: int = 0
    reads: int = 0
    waits: int = 0


@contextmanager
def counted() -> Iterator[Counted]:
    """Count until the context ends. JAX writes a line to the file descriptor of standard error for each transfer to the device."""
    result = Counted()
    wait = jax.block_until_ready

    def counted_read(read: Callable[..., Any]) -> Callable[..., Any]:
        def run(array: Any, *args: Any, **kwargs: Any) -> Any:
            result.reads += 1
            return read(array, *args, **kwargs)

        return run

    def block_until_ready(arrays: Any) -> Any:
        result.waits += 1
        return wait(arrays)

    sys.stderr.flush()
    saved = os.dup(2)
    with tempfile.TemporaryFile("w+") as lines:
        os.dup2(lines.fileno(), 2)
        try:
            with (
                # By torch; and by float(), numpy and everything else.
                mock.patch.object(ArrayImpl, "__dlpack__", counted_read(ArrayImpl.__dlpack__)),
                mock.patch.object(ArrayImpl, "_value", property(counted_read(ArrayImpl._value.fget))),
                mock.patch.object(jax, "block_until_ready", block_until_ready),
                jax.transfer_guard_host_to_device("log_explicit"),
            ):
                yield result
        finally:
            os.dup2(saved, 2)
            os.close(saved)
        lines.seek(0)
        result.to_device = sum("host-to-device transfer" in line for line in lines)


@pytest.mark.parametrize(
    "backend", [pytest.param("jax:d1", marks=pytest.mark.world(1)), pytest.param("jax:t2", marks=pytest.mark.world(2))]
)
def test_step_transfers_inputs_and_a_gradient_for_each_micro_batch(backend: str) -> None:
    given = {"path": family_dir("qwen3"), "mb_spec": MicroBatchSpec(n_mbs=MICRO_BATCHES)}
    with started(backend, **given) as engine:
        batch = local_batch(engine, global_batch())
        engine.train_batch(batch, loss)  # compiles
        with counted() as step:
            engine.train_batch(batch, loss)
        with counted() as forward:
            engine.forward_batch(batch)
    # A gradient of the log-probs goes back; the optimizer takes the clipping factor, its settings and its counts.
    assert step.to_device == MICRO_BATCHES * (INPUTS + 1) + 3
    assert forward.to_device == MICRO_BATCHES * INPUTS
    # The outputs of each micro-batch, and the norm of the gradients, which clipping needs.
    assert step.reads == MICRO_BATCHES + 1
    assert forward.reads == MICRO_BATCHES
    # The host waits for each backward, the scaled gradients and the update, in addition to what it reads.
    assert step.waits == MICRO_BATCHES + 2
    assert forward.waits == 0
