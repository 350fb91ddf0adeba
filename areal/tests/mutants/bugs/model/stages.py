"""Bugs of the messages between Megatron's pipeline stages."""

from __future__ import annotations

from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from areal.tests.mutants.planting import Function, mutant

MESSAGES = "dist/megatron/test_stage_messages.py::test_stages_exchange_no_shapes_and_the_host_does_not_wait"


@mutant("areal.engine.megatron.schedule:StageCommunicator._communicate_shapes", f"{MESSAGES}[megatron:p2]")
def shapes_are_sent_ahead(right: Function) -> Function:
    """Each message is announced by its shape, for which the host waits."""
    return P2PCommunicator._communicate_shapes


@mutant(
    "areal.engine.megatron.schedule:micro_batches_of_messages",
    "dist/megatron/test_stage_messages.py::test_ends_of_an_interleaved_pipeline_exchange_all_chunks_but_one",
)
def ends_of_a_pipeline_expect_no_messages(right: Function) -> Function:
    """The ends of an interleaved pipeline expect the messages of a pipeline without chunks."""
    return lambda table, stage, stages, chunks: right(table, stage, stages, 1)


@mutant("areal.engine.megatron.model.config:_parallel", f"{MESSAGES}[megatron:p2]")
def host_waits_for_each_message(right: Function) -> Function:
    """The host waits for the device after each message."""
    return lambda *args: {**right(*args), "batch_p2p_sync": True}
