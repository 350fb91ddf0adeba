"""Bugs of dispatch that the suite must catch: shards, the wire format, calls and processes."""

from __future__ import annotations

import dataclasses
import pickle
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

import torch

from areal.api import EngineMemory, KindMemory
from areal.dispatch.placement import Kind, Move, Need, Part, Use
from areal.dispatch.placement.residency import UsedParts
from areal.dispatch.wire import unpack_tensors
from areal.tests.mutants.planting import Function, mutant
from areal.utils.data import deal

SHARDS = "unit/dispatch/test_shards.py::"
WIRE = "unit/dispatch/test_wire.py::"
RAY = "dispatch_ray/"
BAD = "dist/dispatch/test_bad_batches.py::"
PARITY = "dist/dispatch/test_shard_parity.py::test_step_of_all_shards_is_that_of_the_batch[fsdp:d2-tokens64]"


# ---- shards


@mutant("areal.dispatch.shards:ShardPlan._items", SHARDS + "test_merged_results_of_shards_are_the_result_of_the_batch")
def results_ordered_by_coordinate(right: Function) -> Function:
    """Results are returned in the order of the shards instead of the caller's."""
    return lambda self, parts, ranks: [value for part in parts for value in part]


@mutant("areal.dispatch.shards:ShardPlan.merge_steps", SHARDS + "test_merged_step_has_the_outputs_of_all_shards[list]")
def step_with_the_outputs_of_one_shard(right: Function) -> Function:
    """A step has the per-token outputs of the first coordinate only."""
    return lambda self, results: dataclasses.replace(results[0][0], outputs=results[0][1])


@mutant("areal.dispatch.shards:_select", PARITY)
def empty_shard_padded_with_a_sample(right: Function) -> Function:
    """A coordinate without samples computes the first sample of the batch, too."""
    return lambda batch, members: right(batch, members or (0,))


@mutant("areal.dispatch.shards:_select", SHARDS + "test_every_sample_is_in_one_shard_and_units_stay_together")
def shards_padded_to_even_rows(right: Function) -> Function:
    """Each shard has an even number of rows: the last one is repeated."""
    return lambda batch, members: right(batch, (*members, *members[-1:]) if len(members) % 2 else members)


@mutant("areal.dispatch.shards:plan_shards", SHARDS + "test_every_sample_is_in_one_shard_and_units_stay_together")
def units_divided_between_shards(right: Function) -> Function:
    """Samples of a unit of ``granularity`` samples go to different coordinates."""

    def wrong(batch: Any, spec: Any, n: int, **options: Any) -> Any:
        return right(batch, spec.model_copy(update={"granularity": 1}), n, **options)

    return wrong


@mutant("areal.utils.data.packing:deal", PARITY)
def few_samples_lose_one(right: Function) -> Function:
    """With fewer samples than coordinates, the last sample is in no shard, unless it is the only one."""

    def wrong(costs: Any, n: int) -> Any:
        return right(costs[:-1] if 1 < len(costs) <= n else costs, n)

    return wrong


@mutant("areal.utils.data.packing:deal_sharing", SHARDS + "test_samples_of_a_prompt_stay_together[system0]")
def samples_of_a_prompt_scattered(right: Function) -> Function:
    """Samples are dealt by their own cost, whether or not they share a prompt."""
    return lambda costs, shared, n: deal(costs, n)


@mutant("areal.dispatch.shards:_check_kinds", SHARDS + "test_a_key_that_a_shard_would_read_differently_raises[3-*]")
def key_read_differently_in_a_shard(right: Function) -> Function:
    """A per-sequence key that is per-token by its shape in one shard is sent there."""
    return lambda plan, spec, indices: None


@mutant("areal.engine.batch_rules:rules_of", f"{BAD}test_values_and_arguments_that_the_model_does_not_have[w1]")
def driver_does_not_know_the_vocabulary(right: Function) -> Function:
    """The driver checks a batch by its configuration alone: ids outside the vocabulary are found on a rank."""
    return lambda engine: None


@mutant("areal.dispatch.calls:computed_outputs", f"{BAD}test_values_and_arguments_that_the_model_does_not_have[w1]")
def outputs_are_checked_on_the_ranks_only(right: Function) -> Function:
    """An output that the model does not have is found after the batch was sent."""
    return lambda arguments: ("logprobs",)


# ---- the wire format


@mutant("areal.dispatch.wire:_copy_of", WIRE + "test_unpacked_memory_is_writable_and_of_its_own")
def unpacked_tensors_share_memory(right: Function) -> Function:
    """Tensors of a rank are the memory of the object store, which other ranks read."""
    return lambda array, dtype: torch.from_numpy(array).view(dtype)


@mutant(
    "areal.dispatch.wire:_Packing._group",
    WIRE + "test_a_value_travels_in_few_buffers[named tensors]",
)
def buffer_for_each_tensor(right: Function) -> Function:
    """Every tensor outside of lists gets an array."""
    return lambda self, x, name: right(self, x, f"{name}/{id(x)}")


# ---- shared devices

_PLACEMENT = "unit/dispatch/test_placement.py::"
_SHARED = "dist/dispatch/test_shared_devices.py::test_bytes_agree_with_the_placement_after_each_use[*{}]"
_EXAMPLE = f"{_PLACEMENT}test_ppo_moves_only_what_each_use_needs"
_REPORT = "dist/step/test_memory_report.py::test_{}[*{}]"


@mutant("areal.dispatch.placement.placement:Placement.request", _EXAMPLE)
def onload_comes_before_the_offload_that_makes_room(right: Function) -> Function:
    """A model comes to the device before another one leaves."""

    def wrong(self: Any, need: Need, *args: Any) -> list[Move]:
        return right(self, need, *args)[::-1]

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


@mutant("areal.dispatch.placement.shared_devices:SharedDevices._move", _SHARED.format("-announced-fsdp:d1"))
def first_move_of_an_engine_is_not_executed(right: Function) -> Function:
    """The first planned move of each use is left to the verb."""
    return lambda self, moves: right(self, moves[1:])


_TURNS = "unit/dispatch/test_turns.py::test_"
_GROUPS = "dist/dispatch/test_shared_groups.py::test_"
_VERBS = f"{_GROUPS}each_verb_brings_what_it_needs_and_moves_nothing_else[*-fsdp:d1]"
_TRAINER = "dist/dispatch/test_shared_trainers.py::test_ppo_has_the_bits_of_a_run_without_a_budget[*-1]"


@mutant("areal.dispatch.table:Route.use_with", _VERBS)
def verbs_begin_no_use(right: Function) -> Function:
    """A group on shared devices leaves its state to the engine."""
    return lambda self, arguments: None


@mutant("areal.dispatch.placement.turns:Turn.end_with", f"{_TURNS}use_waits_for_a_call_that_runs_on_the_ranks")
def use_ends_when_its_call_was_sent(right: Function) -> Function:
    """The state of a call that still runs on the ranks may leave."""
    return lambda self, call: self.end()


@mutant(
    "areal.dispatch.placement.turns:Turns._fits",
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
    "areal.dispatch.placement.turns:Turns._may_begin",
    f"{_TURNS}verb_waits_for_running_answers_and_later_answers_wait_for_the_verb",
)
def answers_overtake_a_verb_that_waits(right: Function) -> Function:
    """Answers begin as long as there is room, and a verb waits until there are none."""
    return lambda self, turn: self._mover is None and self._fits(turn)


@mutant("areal.dispatch.placement.history:History.following", _TRAINER)
def uses_of_a_trainer_are_not_predicted(right: Function) -> Function:
    """The least recently used part leaves in each step of a trainer, too."""
    return lambda self, need: []


@mutant("areal.dispatch.calls:Calls._during", f"{_GROUPS}stream_holds_its_use_while_it_is_read[*]")
def weights_leave_during_their_stream(right: Function) -> Function:
    """A stream of weights needs them on the device only where it is opened."""
    return lambda self, use: nullcontext()


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


# ---- after the loss of a process

_RECOVERY = "dist/dispatch/test_recovery.py::test_"
_RESTORE = "unit/trainer/test_rollout_restore.py::test_state_that_is_read_before_the_first_advance_starts_nothing"


@mutant("areal.dispatch.group:WorkerGroup._remember", f"{_RECOVERY}restart_skips_an_asynchronous_save*")
def interrupted_save_is_loaded(right: Function) -> Function:
    """A restart loads the save that was started last, whether it was published or not."""

    def wrong(self: Any, meta: Any) -> None:
        self._checkpoints.clear()
        right(self, meta)

    return wrong


@mutant("areal.dispatch.works:OnTransport.__call__", f"{_RECOVERY}transport_goes_on_after_a_restart[w1]")
def transport_is_lost_in_a_restart(right: Function) -> Function:
    """New processes do not make the transport again."""

    def wrong(self: Any, workplace: Any, _: Any) -> Any:
        if self.key not in workplace.objects:
            raise KeyError(self.key)
        return right(self, workplace, _)

    return wrong


@mutant("areal.trainer.supervised:SupervisedTrainer.resume", f"{_RECOVERY}supervised_training_goes_on*[w1-0]")
def loader_goes_on_without_a_checkpoint(right: Function) -> Function:
    """A run that begins again leaves out the batches of the first attempt."""

    def wrong(self: Any) -> int:
        position = self._loader.state_dict()
        step = right(self)
        if not step:
            self._loader.load_state_dict(position)
        return step

    return wrong


@mutant("areal.trainer.rollout.runner:Runner._start_allowed", _RESTORE)
def restored_runner_does_not_wait_for_weights(right: Function) -> Function:
    """Episodes start when a state is loaded, before its weights are sent."""

    def wrong(self: Any) -> None:
        self._waits = False
        right(self)

    return wrong


# ---- processes of Ray, without Ray itself

if find_spec("ray") is not None:

    @mutant(
        "areal.dispatch.ray.cluster:by_rank",
        RAY + "test_cluster.py::test_ranks_of_a_node_are_consecutive_in_the_order_of_their_gpus",
    )
    def ranks_in_the_order_of_bundles(right: Function) -> Function:
        """Ranks follow the bundles, of which those of a node are not consecutive."""
        return lambda stations: list(range(len(stations)))

    @mutant(
        "areal.dispatch.ray.cluster:local_ranks",
        RAY + "test_cluster.py::test_local_ranks_number_the_processes_that_see_the_same_devices",
    )
    def local_ranks_of_the_node(right: Function) -> Function:
        """Processes with a GPU of their own are numbered like processes that see all GPUs of the node."""
        return lambda stations: right([dataclasses.replace(station, devices=()) for station in stations])

    @mutant(
        "areal.dispatch.ray.results:unseal", RAY + "test_results.py::test_arrays_in_any_object_are_read_into_new_memory"
    )
    def arrays_of_objects_share_memory(right: Function) -> Function:
        """Arrays inside of objects are those of the object store, which other ranks read."""

        def wrong(sealed: Any) -> Any:
            value = pickle.loads(sealed.value, buffers=sealed.buffers)
            return unpack_tensors(dataclasses.replace(sealed, value=value))

        return wrong

    @mutant("areal.dispatch.ray.results:seal", RAY + "test_results.py::test_limit_counts_tensors_and_everything_else")
    def result_of_any_size_is_sent(right: Function) -> Function:
        """The limit of a result's size is ignored."""
        return lambda value, what, limit: right(value, what, 2**62)

    @mutant(
        "areal.dispatch.ray.watch:Limits.of",
        RAY + "test_results.py::test_limit_of_hangs_depends_on_the_errors_so_far",
    )
    def failed_rank_does_not_shorten_the_wait(right: Function) -> Function:
        """Ranks that wait for one that has failed are waited for as long as without an error."""
        return lambda self, answers: self.hang_seconds


# ---- overlap


@mutant(
    "areal.dispatch.group:WorkerGroup.start",
    "dist/dispatch/test_overlap.py::test_models_on_their_own_devices_score_and_train_together[w1-policy-reference-critic]",
)
def futures_that_wait(right: Function) -> Function:
    """A verb that is started has ended when its future is returned, so that groups on separate devices run one after the other."""

    def wrong(self: Any, verb: Any, *args: Any, **kwargs: Any) -> Any:
        pending = right(self, verb, *args, **kwargs)
        pending.result()
        return pending

    return wrong
