"""Bugs of the messages between Megatron's pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from areal.tests.mutants.planting import Function, mutant

MESSAGES = "dist/megatron/test_stage_messages.py::test_stages_exchange_no_shapes_and_the_host_does_not_wait"


@mutant("areal.engine.megatron.schedule:StageCommunicator._communicate_shapes", f"{MESSAGES}[megatron:p2]")
def shapes_are_sent_ahead(right: Function) -> Function:
    """Each message is announced by its shape, for which the host waits."""
    return P2PCommunicator._communicate_shapes


@mutant("areal.engine.megatron.schedule:StageCommunicator.expect", f"{MESSAGES}[megatron:p2v2]")
def interleaved_stages_expect_micro_batches_in_order(right: Function) -> Function:
    """Each chunk gets all micro-batches before the next one does."""

    def wrong(self: Any, lengths: Sequence[int]) -> None:
        chunks = self.virtual_pipeline_model_parallel_size or 1
        self._from_prev, self._from_next = iter([*lengths] * chunks), iter([*lengths] * chunks)

    return wrong


@mutant("areal.engine.megatron.model.config:_parallel", f"{MESSAGES}[megatron:p2]")
def host_waits_for_each_message(right: Function) -> Function:
    """The host waits for the device after each message."""
    return lambda *args: {**right(*args), "batch_p2p_sync": True}
