"""Bugs of shared devices that the suite must catch: the placement, the turns of their users, and the rollout."""

from __future__ import annotations

from typing import Any

from areal.api import EngineMemory, KindMemory
from areal.dispatch.shared_devices import Kind, Move, Need, Part, Use
from areal.dispatch.shared_devices.eviction import UsedParts
from areal.inference.http.server_state import Serving
from areal.tests.mutants.planting import Function, mutant

_PLACEMENT = "unit/dispatch/test_placement.py::"
_SHARED = "dist/dispatch/test_shared_devices.py::test_bytes_agree_with_the_placement_after_each_use[{}]"
_EXAMPLE = f"{_PLACEMENT}test_ppo_moves_only_what_each_use_needs"
_REPORT = "dist/step/test_memory_report.py::test_{}[*{}]"


@mutant("areal.dispatch.shared_devices.placement:Placement.request", _EXAMPLE)
def onload_comes_before_the_offload_that_makes_room(right: Function) -> Function:
    """A model comes to the device before another one leaves."""

    def wrong(self: Any, need: Need, *args: Any) -> list[Move]:
        return right(self, need, *args)[::-1]

    return wrong


@mutant("areal.dispatch.shared_devices.placement:Placement._request", _EXAMPLE)
def optimizer_is_needed_for_a_forward(right: Function) -> Function:
    """A forward brings the optimizer state to the device."""

    def wrong(self: Any, need: Need) -> UsedParts:
        if need.use is not Use.FORWARD:
            return right(self, need)
        request = right(self, need)
        return UsedParts(request.needed | {Part(need.owner, Kind.OPTIMIZER)}, request.created, request.freed)

    return wrong


@mutant(
    "areal.dispatch.shared_devices.eviction:Eviction._without_surplus",
    f"{_PLACEMENT}test_small_part_that_makes_room_alone_leaves_alone",
)
def parts_leave_in_vain(right: Function) -> Function:
    """Parts leave although what leaves after them makes room for all."""
    return lambda self, kept, victims: list(victims)


@mutant("areal.dispatch.shared_devices.eviction:Eviction._victims", f"{_PLACEMENT}test_each_device_has_its_own_budget")
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


@mutant("areal.dispatch.shared_devices.eviction:Eviction.plan", f"{_PLACEMENT}test_announced_uses_keep_what_comes_next")
def announced_uses_are_ignored(right: Function) -> Function:
    """The least recently used part leaves, whatever comes next."""
    return lambda self, request, upcoming=(), pinned=frozenset(): right(self, request, (), pinned)


@mutant("areal.dispatch.shared_devices.placement:Placement.release", _EXAMPLE, _SHARED.format("fsdp:d1"))
def gradients_stay_after_a_step(right: Function) -> Function:
    """Gradients that a step has freed still count."""

    def wrong(self: Any, need: Need) -> None:
        self._active.remove(need)

    return wrong


@mutant("areal.dispatch.shared_devices.devices:SharedDevices._move", _SHARED.format("fsdp:d1"))
def first_move_of_an_engine_is_not_executed(right: Function) -> Function:
    """The first planned move of each use is left to the verb."""
    return lambda self, moves: right(self, moves[1:])


_TURNS = "unit/dispatch/test_turns.py::test_"
_GROUPS = "dist/dispatch/test_shared_groups.py::test_"
_VERBS = f"{_GROUPS}each_verb_brings_what_it_needs_and_moves_nothing_else[fsdp:d1]"
_CYCLE = "unit/dispatch/test_turns.py::test_a_repeated_cycle_moves_less_than_by_the_least_recently_used_rule"


@mutant("areal.dispatch.table:Route.use_with", _VERBS)
def verbs_begin_no_use(right: Function) -> Function:
    """A group on shared devices leaves its state to the engine."""
    return lambda self, arguments: None


@mutant("areal.dispatch.shared_devices.turns:Turn.end_with", f"{_TURNS}use_waits_for_a_call_that_runs_on_the_ranks")
def use_ends_when_its_call_was_sent(right: Function) -> Function:
    """The state of a call that still runs on the ranks may leave."""
    return lambda self, call: self.end()


@mutant(
    "areal.dispatch.shared_devices.turns:Turns._fits",
    f"{_TURNS}nested_use_that_cannot_fit_raises_instead_of_waiting_for_itself",
    f"{_TURNS}threads_that_wait_for_each_other_raise",
)
def uses_wait_for_each_other(right: Function) -> Function:
    """A use waits for room that no thread can give."""

    def wrong(self: Any, turn: Any) -> bool:
        self._release()
        return not self._lacks_room(turn)

    return wrong


@mutant(
    "areal.dispatch.shared_devices.turns:Turns._may_begin",
    f"{_TURNS}verb_waits_for_running_answers_and_later_answers_wait_for_the_verb",
)
def answers_overtake_a_verb_that_waits(right: Function) -> Function:
    """Answers begin as long as there is room, and a verb waits until there are none."""
    return lambda self, turn: self._mover is None and self._fits(turn)


@mutant("areal.dispatch.shared_devices.turns:History.following", _CYCLE)
def uses_of_a_trainer_are_not_predicted(right: Function) -> Function:
    """The least recently used part leaves in each step of a trainer, too."""
    return lambda self, need: []


@mutant("areal.dispatch.calls:Calls._begin", f"{_GROUPS}stream_holds_its_use_while_it_is_read[*]")
def weights_leave_during_their_stream(right: Function) -> Function:
    """A stream of weights needs them on the device only where it is opened."""
    return lambda self, use, *, call=False: right(self, use, call=call) if call else None


@mutant("areal.dispatch.calls:Calls.leave_devices", f"{_GROUPS}destroyed_model_leaves_the_devices[*]")
def destroyed_model_keeps_its_place(right: Function) -> Function:
    """Bytes of a model that was destroyed still count."""
    return lambda self: None


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
    "areal.engine.lora.adapter_set:AdapterSet.memory",
    _REPORT.format("adapters_are_counted_and_stay_on_the_device", "fsdp:d1"),
)
def adapters_are_not_reported(right: Function) -> Function:
    """The report leaves out the adapters."""
    return lambda self, device: EngineMemory()


@mutant(
    "areal.utils.offload:expected_state_bytes", _REPORT.format("report_equals_the_bytes_of_the_tensors", "megatron:d2")
)
def optimizer_state_is_not_announced(right: Function) -> Function:
    """The report does not announce the optimizer state that the first step creates."""
    return lambda optimizer: 0


_SLEEP = "unit/inference/local/test_sleep.py::test_"


@mutant("areal.inference.local.rollout:LocalRollout.sleep", f"{_SLEEP}sleep_with_running_answers_is_refused")
def sleep_loses_running_answers(right: Function) -> Function:
    """A rollout goes to sleep while answers are running."""

    def wrong(self: Any) -> None:
        self._requests._pending.clear()
        right(self)

    return wrong


@mutant(
    "areal.inference.http.rollout:HTTPRollout._check_awake",
    f"{_SLEEP}update_of_sleeping_servers_is_refused_and_not_lost[vllm]",
)
def sleeping_servers_get_weights(right: Function) -> Function:
    """An update is sent to servers that are asleep."""
    return lambda self: None


@mutant("areal.inference.http.fleet:wake_server", f"{_SLEEP}sglang_without_a_backup_needs_an_update")
def lost_weights_of_a_server_are_used(right: Function) -> Function:
    """A server whose weights did not survive its sleep generates."""

    async def wrong(server: Any, seconds: float) -> str:
        version = server.version
        fault = await right(server, seconds)
        server.enter(Serving(version))
        return fault

    return wrong
