"""Bugs after which ranks wait for each other or disagree whether the engine can be used, and options that are ignored."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from areal.tests.mutants.planting import Function, mutant

ENGINE = "dist/faults/test_lost_engine.py::"
REFUSED = "dist/test_options.py::test_an_option_that_an_engine_does_not_support_is_refused[{}]"
UNDECLARED = "unit/engine/test_parallel_dims_and_config.py::test_options_that_an_engine_does_not_declare_are_refused[*value_head*]"
LAYOUT = "dist/faults/test_every_layout.py::test_fault_on_one_rank_ends_the_call_on_every_rank[{}]"


@mutant(
    "areal.engine.state:EngineState._teardown_after_fault",
    ENGINE + "test_ranks_agree_after_the_model_failed_in_a_forward_on_one_rank[w2-fsdp:r2]",
)
def peers_keep_their_components(right: Function) -> Function:
    """Only the rank whose model failed releases its components."""

    def wrong(self: Any) -> None:
        if str(self.control.verdict).startswith(f"rank {self.control.rank}:"):
            right(self)

    return wrong


@mutant("areal.utils.platform:is_device_lost", ENGINE + "test_lost_device_is_final_for_the_process[fsdp:d1]")
def sticky_errors_are_recoverable(right: Function) -> Function:
    """An engine goes on after an error that every later call to the device repeats."""
    return lambda error: False


@mutant("areal.engine.state:EngineState._teardown", ENGINE + "test_lost_device_is_final_for_the_process[fsdp:r2]")
def clean_up_may_raise(right: Function) -> Function:
    """The clean-up after a fault raises the sticky error again, in place of the one that all ranks agreed on."""

    def wrong(self: Any, why: str) -> None:
        right(self, why)
        if self.control.verdict is not None and "restart the process" in why:
            raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    return wrong


@mutant(
    "areal.utils.group_set:GroupSet.abort",
    ENGINE + "test_groups_are_aborted_after_a_fault_and_destroyed_otherwise[w2-fsdp:d2]",
)
def groups_are_destroyed_after_a_fault(right: Function) -> Function:
    """Process groups are destroyed after a fault, which waits for collectives that never complete."""
    return lambda self: None


@mutant(
    "areal.utils.group_set:GroupSet._connections", ENGINE + "test_abort_wakes_a_thread_that_waits_in_a_collective[w2]"
)
def gloo_is_not_aborted(right: Function) -> Function:
    """The connections of gloo groups stay open after an abort."""
    return lambda self: iter(())


@mutant(
    "areal.engine.fsdp.engine:_recover",
    ENGINE + "test_error_before_the_first_forward_is_the_one_that_is_raised[w1-fsdp:d1]",
)
def reset_before_the_first_forward(right: Function) -> Function:
    """FSDP is reset before its first forward, which initializes the state."""

    def wrong(model: Any) -> bool:
        model.reset_iter_state()
        return right(model)

    return wrong


@mutant(
    "areal.engine.base:BaseTrainEngine._reset_model",
    ENGINE + "test_model_that_cannot_be_reset_ends_the_engine[w1]",
)
def failed_reset_counts_as_done(right: Function) -> Function:
    """An engine goes on although the reset of its model failed."""

    def wrong(self: Any) -> bool:
        right(self)
        return True

    return wrong


@mutant(
    "areal.engine.state:EngineState._ending_on_error",
    ENGINE + "test_error_outside_of_the_model_ends_the_engine_on_every_rank[optimizer-fsdp:d2]",
)
def optimizer_fails_alone(right: Function) -> Function:
    """An error of the optimizer raises on its own rank only."""

    class Nothing:
        def __enter__(self) -> None:
            pass

        def __exit__(self, *_: Any) -> None:
            pass

    return lambda self, note="", **_: Nothing()


@mutant(
    "areal.engine.state:EngineState._stream",
    ENGINE + "test_error_in_a_stream_on_one_rank_raises_on_every_rank[w2-fsdp-tensors-value]",
)
def stream_fails_alone(right: Function) -> Function:
    """An error in a stream of weights raises on its own rank only."""
    return lambda self, tensors: tensors


@mutant("areal.utils.fault_watch:FaultWatch._report", LAYOUT.format("fsdp:d2-blocks-backward"))
def fault_is_kept_for_itself(right: Function) -> Function:
    """A rank does not send its fault to the others."""

    def wrong(self: Any, fault: Any) -> None:
        self._decide(fault)

    return wrong


@mutant("areal.utils.fault_watch:FaultWatch.__init__", ENGINE + "test_rank_without_a_sign_of_life_is_lost[w2]")
def silence_is_not_noticed(right: Function) -> Function:
    """A rank without a sign of life is waited for."""

    def wrong(self: Any, rank: int, size: int, gather: Any, address: str, silence: float, on_verdict: Any) -> None:
        right(self, rank, size, gather, address, 1e6, on_verdict)

    return wrong


@mutant("areal.utils.fault_watch:_Link.send", ENGINE + "test_rank_that_lives_is_waited_for[w2]")
def beats_only_with_messages(right: Function) -> Function:
    """A rank that computes gives no sign of life."""
    return lambda self, message: True if message is None else right(self, message)


@mutant("areal.utils.group_set:as_timeout", ENGINE + "test_control_timeout_limits_how_late_a_rank_may_be[w2]")
def control_timeout_without_effect(right: Function) -> Function:
    """The time of exchanges between ranks is not limited."""
    return lambda seconds: right(None)


# ---- options


@mutant("areal.engine.options:_unsupported", UNDECLARED)
def unsupported_options_ignored(right: Function) -> Function:
    """An option that the engine does not support has no effect and raises no error."""
    return lambda values, supported, prefix="": iter(())


@mutant("areal.engine.options:_changed", REFUSED.format("megatron-fsdp.compile"))
def foreign_sections_ignored(right: Function) -> Function:
    """Options in the section of another engine have no effect and raise no error."""
    return lambda name, section: iter(())


@mutant(
    "areal.engine.faults:refusing_backward",
    "dist/faults/test_bad_losses.py::test_invalid_loss_on_one_rank_raises_on_all_ranks[fsdp:p2]",
)
def losses_may_go_back(right: Function) -> Function:
    """A loss function that calls backward leaves its rank out of step."""
    return lambda outputs: contextlib.nullcontext()
