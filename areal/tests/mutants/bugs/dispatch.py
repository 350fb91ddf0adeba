"""Bugs of dispatch that the suite must catch: shards, the wire format, calls and processes."""

from __future__ import annotations

import dataclasses
import pickle
from importlib.util import find_spec
from typing import Any

import torch

from areal.dispatch.wire import unpack_tensors
from areal.tests.mutants.planting import Function, mutant
from areal.utils.data import deal

SHARDS = "unit/dispatch/test_shards.py::"
WIRE = "unit/dispatch/test_wire.py::"
RAY = "dispatch_ray/"
BAD = "dist/dispatch/test_bad_batches_in_the_driver.py::"
SERVER = "unit/tinker/service/"
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


# ---- after the loss of a process

_RECOVERY = "dist/dispatch/test_recovery.py::test_"
_RESTORE = "unit/rollout/test_restore.py::test_state_loaded_during_a_run_replaces_running_episodes[1]"


@mutant("areal.dispatch.group:WorkerGroup._remember", f"{_RECOVERY}restart_skips_an_asynchronous_save*")
def interrupted_save_is_loaded(right: Function) -> Function:
    """A restart loads the save that was started last, whether it was published or not."""

    def wrong(self: Any, meta: Any) -> None:
        self._checkpoints.clear()
        right(self, meta)

    return wrong


@mutant("areal.dispatch.rank_calls:OnTransport.__call__", f"{_RECOVERY}transport_goes_on_after_a_restart[w1]")
def transport_is_lost_in_a_restart(right: Function) -> Function:
    """New processes do not make the transport again."""

    def wrong(self: Any, rank_objects: Any, _: Any) -> Any:
        if self.key not in rank_objects.by_name:
            raise KeyError(self.key)
        return right(self, rank_objects, _)

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


@mutant("areal.trainer.rollout.runner:Runner.load_state_dict", _RESTORE)
def restored_runner_does_not_wait_for_weights(right: Function) -> Function:
    """Episodes start when a state is loaded, before its weights are sent."""

    def wrong(self: Any, state: Any) -> None:
        right(self, state)
        self._waits = False
        self._soon(self._start_allowed)

    return wrong


# ---- processes of Ray, without Ray itself


@mutant(
    "areal.dispatch.group:WorkerGroup._on_layout",
    "dist/dispatch/test_recovery.py::test_group_goes_on_in_another_layout_after_a_loss[*fsdp:d1]",
)
def layout_of_a_restart_ignored(right: Function) -> Function:
    """A group restarts on the layout that it had."""
    return lambda self, layout: self.config


if find_spec("ray") is not None:

    @mutant(
        "areal.dispatch.ray.processes:Processes.without",
        "unit/dispatch/test_ray_processes.py::test_processes_that_reply_after_a_loss_make_a_world",
    )
    def lost_process_goes_on(right: Function) -> Function:
        """The lost process is asked, too, and the one before it is not."""
        return lambda self, lost, *args: right(self, lost - 1, *args)

    @mutant(
        "areal.dispatch.ray.cluster:by_rank",
        "unit/dispatch/test_ray_processes.py::test_ranks_of_a_node_are_consecutive_in_the_order_of_their_gpus",
    )
    def ranks_in_the_order_of_bundles(right: Function) -> Function:
        """Ranks follow the bundles, of which those of a node are not consecutive."""
        return lambda process_infos: list(range(len(process_infos)))

    @mutant(
        "areal.dispatch.ray.cluster:local_ranks",
        "unit/dispatch/test_ray_processes.py::test_local_ranks_number_the_processes_that_see_the_same_devices",
    )
    def local_ranks_of_the_node(right: Function) -> Function:
        """Processes with a GPU of their own are numbered like processes that see all GPUs of the node."""
        return lambda process_infos: right([dataclasses.replace(info, devices=()) for info in process_infos])

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

    @mutant(
        "areal.dispatch.ray.watch:_both",
        RAY + "test_watch.py::test_first_error_is_raised_when_the_other_ranks_wait_for_it",
    )
    def first_error_is_lost(right: Function) -> Function:
        """Ranks that wait for one that has failed are named, and its error is not."""
        return lambda first, other: other

    @mutant(
        "areal.dispatch.errors:refusal",
        RAY + "test_watch.py::test_process_that_dies_between_calls_is_noticed",
    )
    def loss_between_calls_is_no_loss(right: Function) -> Function:
        """A loop that goes on after a lost process ends if the loss came between two calls."""
        return lambda text, ended: RuntimeError(text)

    @mutant(
        "areal.dispatch.ray.watch:Watch._set_limit",
        RAY + "test_watch.py::test_error_of_a_later_call_shortens_the_wait_for_an_earlier_one",
    )
    def limit_of_the_first_call_only(right: Function) -> Function:
        """What a rank reports in a later call is read when the earlier one has ended."""

        def wrong(self: Any) -> None:
            running = self._replies.running
            self._replies.running = running[:1]
            right(self)
            self._replies.running = running

        return wrong


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


# ---- training server


@mutant(
    "areal.tinker.service.order:LiveModel.head",
    SERVER + "test_order.py::test_groups_have_one_request_per_model_and_keep_each_order",
)
def requests_run_in_order_of_arrival(right: Function) -> Function:
    """A missing number is skipped instead of waited for."""

    def wrong(self: Any) -> Any:
        if self.waiting and not self.busy:
            self.next_seq = min(self.waiting)
        return right(self)

    return wrong


@mutant("areal.tinker.service.store.futures:_insert", SERVER + "test_order.py::test_concurrent_retries_are_one_request")
def retries_executed_again(right: Function) -> Function:
    """A retried request is stored as a new one."""
    return lambda connection, row, journaled: right(connection, row | {"seq_id": None}, None)


@mutant(
    "areal.tinker.service.training:Training._watch_gap",
    SERVER + "test_order.py::test_a_gap_waits_and_then_fails_what_waits_without_executing_it",
)
def gaps_wait_for_ever(right: Function) -> Function:
    """Requests that wait for one that never arrives are never answered."""
    return lambda self, model: None


@mutant(
    "areal.tinker.service.verbs.forward_backward:_check_ids",
    SERVER + "test_validation.py::test_each_fault_is_named[id above]",
)
def ids_not_checked(right: Function) -> Function:
    """Token ids outside the vocabulary reach the backend."""
    return lambda rows, name, limits: list(rows)


@mutant(
    "areal.tinker.service.store.files:CheckpointFiles._inside",
    SERVER + "test_checkpoint_store.py::test_a_link_does_not*",
)
def links_followed(right: Function) -> Function:
    """A checkpoint is read and written through a link that leaves the root."""
    return lambda self, folder: folder


@mutant(
    "areal.tinker.service.store.database:Database._transact",
    SERVER + "test_durability.py::test_a_server_that_lost_its_lease_stops_writing_and_fails",
)
def lease_not_checked(right: Function) -> Function:
    """A server that lost its lease goes on writing."""
    return lambda self, work, owned: right(self, work, False)


@mutant("areal.tinker.service.runs:Runs.recover", SERVER + "test_durability.py::test_kill_at_any_point*[12]")
def unfinished_requests_forgotten(right: Function) -> Function:
    """Requests that a killed server left unfinished stay pending for ever."""

    async def wrong(self: Any, survivors: Any, reasons: Any) -> None:
        pass

    return wrong


@mutant("areal.tinker.service.snapshots:Snapshots.close", SERVER + "test_sessions.py::test_finish_releases_models*")
def snapshots_stay_open(right: Function) -> Function:
    """The weights of a sampling session stay in memory after its end."""

    async def wrong(self: Any, uid: Any) -> None:
        pass

    return wrong


@mutant(
    "areal.dispatch.rank_calls:TensorStream.part",
    "dist/dispatch/test_group_streams.py::test_parts_of_a_stream_are_below_the_limit_of_results[w1]",
)
def stream_in_one_part(right: Function) -> Function:
    """All tensors of a stream are in one reply."""
    return lambda self, nbytes: right(self, 2**62)
