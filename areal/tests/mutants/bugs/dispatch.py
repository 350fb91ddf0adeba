"""Bugs of dispatch that the suite must catch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from areal.api import EngineMemory, KindMemory
from areal.dispatch.placement import Kind, Move, Need, Part, Use
from areal.dispatch.placement.residency import UsedParts
from areal.tests.mutants.planting import Function, mutant

# ---- shared devices

_PLACEMENT = "unit/dispatch/test_placement.py::"
_SHARED = "dist/dispatch/test_shared_devices.py::test_bytes_agree_with_the_placement_after_each_use[*{}]"
_EXAMPLE = f"{_PLACEMENT}test_ppo_moves_only_what_each_use_needs"
_REPORT = "dist/step/test_memory_report.py::test_{}[*{}]"


@mutant("areal.dispatch.placement.placement:Placement.request", _EXAMPLE)
def onload_comes_before_the_offload_that_makes_room(right: Function) -> Function:
    """A model comes to the device before another one leaves."""

    def wrong(self: Any, need: Need, upcoming: Sequence[Need] = ()) -> list[Move]:
        return right(self, need, upcoming)[::-1]

    return wrong


@mutant("areal.dispatch.placement.placement:Placement._request", _EXAMPLE)
def optimizer_is_needed_for_a_forward(right: Function) -> Function:
    """A forward brings the optimizer state to the device."""

    def wrong(self: Any, need: Need) -> UsedParts:
        if need.use is not Use.FORWARD:
            return right(self, need)
        request = right(self, need)
        return UsedParts(request.needed | {Part(need.owner, Kind.OPTIMIZER)}, request.created, request.freed)

    return wrong


@mutant(
    "areal.dispatch.placement.residency:Residency._without_surplus",
    f"{_PLACEMENT}test_small_part_that_makes_room_alone_leaves_alone",
)
def parts_leave_in_vain(right: Function) -> Function:
    """Parts leave although what leaves after them makes room for all."""
    return lambda self, kept, victims: list(victims)


@mutant("areal.dispatch.placement.residency:Residency._victims", f"{_PLACEMENT}test_each_device_has_its_own_budget")
def only_the_first_device_has_a_budget(right: Function) -> Function:
    """The second device fills up."""

    def wrong(self: Any, *args: Any) -> list[Part]:
        capacity = self.capacity
        self.capacity = dict(list(capacity.items())[:1]) | dict.fromkeys(list(capacity)[1:], 10**9)
        try:
            return right(self, *args)
        finally:
            self.capacity = capacity

    return wrong


@mutant("areal.dispatch.placement.residency:Residency.plan", f"{_PLACEMENT}test_announced_uses_keep_what_comes_next")
def announced_uses_are_ignored(right: Function) -> Function:
    """The least recently used part leaves, whatever comes next."""
    return lambda self, request, upcoming=(), pinned=frozenset(): right(self, request, (), pinned)


@mutant("areal.dispatch.placement.placement:Placement.release", _EXAMPLE, _SHARED.format("-announced-fsdp:d1"))
def gradients_stay_after_a_step(right: Function) -> Function:
    """Gradients that a step has freed still count."""

    def wrong(self: Any, need: Need) -> None:
        self._active.remove(need)

    return wrong


@mutant("areal.dispatch.placement.shared_devices:SharedDevices._execute", _SHARED.format("-announced-fsdp:d1"))
def first_move_of_an_engine_is_not_executed(right: Function) -> Function:
    """The first planned move of each use is left to the verb."""
    return lambda self, moves: right(self, moves[1:])


@mutant("areal.utils.offload:HostMemory.report", _REPORT.format("report_equals_the_bytes_of_the_tensors", "fsdp:d2"))
def memory_reports_the_whole_model(right: Function) -> Function:
    """The report has the bytes of the model instead of those of the shard."""

    def wrong(self: Any, device: Any) -> EngineMemory:
        whole = sum(x.numel() * x.element_size() for x in self._tensors["params"]())
        report = right(self, device)
        return EngineMemory(
            KindMemory(whole) if report.params.on_device else report.params, report.grads, report.optimizer
        )

    return wrong


@mutant(
    "areal.engine.lora.components:AdaptedMemory.report",
    _REPORT.format("adapters_are_counted_and_stay_on_the_device", "fsdp:d1"),
)
def adapters_are_not_reported(right: Function) -> Function:
    """The report leaves out the adapters."""
    return lambda self, device: self._model.report(device)


@mutant(
    "areal.utils.offload:expected_state_bytes", _REPORT.format("report_equals_the_bytes_of_the_tensors", "megatron:d2")
)
def optimizer_state_is_not_announced(right: Function) -> Function:
    """The report does not announce the optimizer state that the first step creates."""
    return lambda optimizer: 0


_SLEEP = "unit/trainer/test_rollout_sleep.py::test_"


@mutant("areal.trainer.rollout.local:LocalRollout.sleep", f"{_SLEEP}sleep_with_running_answers_is_refused")
def sleep_loses_running_answers(right: Function) -> Function:
    """A rollout goes to sleep while answers are running."""

    def wrong(self: Any) -> None:
        self._pending.clear()
        right(self)

    return wrong


@mutant(
    "areal.trainer.rollout.http.client:HTTPRollout._check_awake",
    f"{_SLEEP}update_of_sleeping_servers_is_refused_and_not_lost[vllm]",
)
def sleeping_servers_get_weights(right: Function) -> Function:
    """An update is sent to servers that are asleep."""
    return lambda self: None


@mutant("areal.trainer.rollout.http.server:Server.wake", f"{_SLEEP}sglang_without_a_backup_needs_an_update")
def lost_weights_of_a_server_are_used(right: Function) -> Function:
    """A server whose weights did not survive its sleep generates."""

    async def wrong(self: Any, dialect: Any, seconds: float) -> str:
        version = self.version
        fault = await right(self, dialect, seconds)
        self.version = version
        return fault

    return wrong
