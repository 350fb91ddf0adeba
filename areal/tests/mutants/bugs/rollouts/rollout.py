"""Bugs of rollouts and of their way to the trainer that the suite must catch, as in :mod:`areal.tests.mutants.bugs.step`."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import torch.distributed as dist

from areal.tests.mutants.planting import Function, mutant

SAMPLING = "dist/trainer/test_temperature.py::{}"
EXCHANGE = "dist/trainer/test_rollout_exchange.py::{}"
ONE_OWNER = "dist/trainer/test_one_owner.py::{}"
RUNNER = "unit/rollout/test_runner.py::{}"
ADAPTERS = "unit/inference/local/test_rollout_adapters.py::{}"
SAMPLER = "unit/tinker/backends/test_local_sampler.py::{}"
HTTP_SAMPLER = "unit/tinker/backends/vllm/test_http_sampler.py::{}"
SNAPSHOTS = "unit/tinker/backends/test_sampler_snapshots.py::{}"
REWARDS = "unit/rollout/test_rewards.py::{}"
GROUP = "unit/inference/group/test_group_updates.py::{}"
NCCL = "unit/weight_sync/test_nccl.py::{}"


@mutant(
    "areal.inference.protocol:Completion.segment",
    SAMPLING.format("test_log_probs_are_those_of_the_rollouts_temperature[*fsdp:d1*]"),
    "unit/inference/local/test_sampling_parameters.py::test_sample_has_temperature_of_its_answers[0.5-0.5]",
)
def temperature_not_carried(right: Function) -> Function:
    """A sample does not carry the temperature at which it was sampled."""
    return lambda self: dataclasses.replace(right(self), sampling={})


@mutant(
    "areal.trainer.rollout.sampling_check:SamplingCheck._check_temperature",
    SAMPLING.format("test_distribution_that_the_trainer_cannot_apply_is_refused[*temperature]"),
)
def temperature_of_the_engine_ignored(right: Function) -> Function:
    """A temperature that is set on the engine and differs from that of the rollout is accepted."""
    return lambda self, temperature: None


@mutant(
    "areal.trainer.rollout.exchange:_check_places",
    EXCHANGE.format("test_runners_that_play_the_same_groups_are_refused[*alone]"),
)
def rank_0_of_1_accepted(right: Function) -> Function:
    """Runners that all play the groups of rank 0 of 1 are accepted."""
    return lambda places, plays: None


@mutant(
    "areal.trainer.rollout.runner:_place_in_world",
    EXCHANGE.format("test_runner_without_trainer_plays_its_ranks_groups[*]"),
)
def runner_alone_by_default(right: Function) -> Function:
    """A runner without a rank is rank 0 of 1 in a world of any size."""
    return lambda: (0, 1)


@mutant(
    "areal.trainer.rollout.exchange:RolloutExchange.next_groups",
    EXCHANGE.format("test_groups_go_to_their_coordinate_only[*apart*all ranks]"),
)
def groups_gathered_to_all(right: Function) -> Function:
    """Every rank receives the groups of all ranks."""

    def wrong(self: Any, timeout: float | None = None) -> Any:
        groups = right(self, timeout)
        self._control.gather(groups)
        return groups

    return wrong


@mutant(
    "areal.trainer.rollout.exchange:RolloutExchange.__init__",
    ONE_OWNER.format("test_groups_are_those_of_a_run_in_which_all_ranks_generate[w2-apart-first]"),
)
def positions_in_blocks(right: Function) -> Function:
    """A coordinate trains on consecutive positions of a batch, and not on those that its ranks would run."""

    def wrong(self: Any, runner: Any, dp_rank: int) -> None:
        right(self, runner, dp_rank)
        self._coordinates = sorted(self._coordinates * runner.plan.groups)

    return wrong


@mutant(
    "areal.trainer.rollout.exchange:RolloutExchange.next_groups",
    EXCHANGE.format("test_groups_go_to_their_coordinate_only[*apart*one owner]"),
)
def owner_sends_all_groups(right: Function) -> Function:
    """Every rank receives all groups of an owner, and keeps those of its coordinate."""

    def wrong(self: Any, timeout: float | None = None) -> Any:
        coordinates, dp_rank, receivers = self._coordinates, self._dp_rank, self._receivers
        self._coordinates, self._dp_rank = [0], 0
        self._receivers = {0: [rank for rank in range(self._control.size) if rank != self._control.rank]}
        groups = right(self, timeout)
        self._coordinates, self._dp_rank, self._receivers = coordinates, dp_rank, receivers
        return [group for group in groups if coordinates[group.position % len(coordinates)] == dp_rank]

    return wrong


@mutant(
    "areal.trainer.rollout.runner:Runner.resharded_state",
    ONE_OWNER.format("test_run_resumes_with_other_ranks_that_generate[all-first]"),
)
def waiting_groups_lost_by_a_new_owner(right: Function) -> Function:
    """A run that resumes with another number of ranks that generate skips the groups that wait."""

    def wrong(self: Any, states: Any) -> Any:
        state = right(self, states)
        done = {*state["ahead"], *state["numbers"]}
        lost = {"waiting": [], "numbers": [], "begun": []}
        return state | lost | {"ahead": sorted(done)}

    return wrong


@mutant(
    "areal.trainer.rollout.exchange:_check_places",
    ONE_OWNER.format("test_places_that_leave_out_groups_are_refused[*of two*]"),
)
def owner_that_plays_half(right: Function) -> Function:
    """An owner that is rank 0 of 2 is accepted: half of the groups are never played."""
    return lambda places, plays: None


@mutant(
    "areal.trainer.rollout.call_pool:CallPool.__call__",
    REWARDS.format("test_slow_reward_does_not_hold_up_other_episodes"),
)
def reward_on_the_event_loop(right: Function) -> Function:
    """A synchronous reward runs on the event loop of the episodes."""

    async def wrong(self: Any, *args: Any) -> Any:
        return self._function(*args)

    return wrong


@mutant(
    "areal.trainer.rollout.call_pool:CallPool._abandon",
    REWARDS.format("test_hanging_reward_fails_its_episode_only[1]"),
)
def hanging_reward_keeps_its_thread(right: Function) -> Function:
    """A reward that hangs occupies the pool after its time limit."""
    return lambda self, call: None


@mutant(
    "areal.trainer.rollout.runner:Runner.next_batch",
    RUNNER.format("test_kept_groups_have_the_positions_of_a_full_batch[1]"),
)
def position_from_index(right: Function) -> Function:
    """A replacement has the position of its index, which another group of the batch may have, too."""

    def planted(self: Any, *args: Any, **options: Any) -> Any:
        return [dataclasses.replace(g, position=g.index % self.plan.groups) for g in right(self, *args, **options)]

    return planted


@mutant(
    "areal.trainer.rollout.report:fmean",
    RUNNER.format("test_reward_is_the_mean_over_episodes"),
)
def reward_of_one_sequence(right: Function) -> Function:
    """The reward of an episode is that of its last sequence."""
    return lambda rewards: list(rewards)[-1]


@mutant(
    "areal.trainer.rollout.exchange:RolloutExchange.gather",
    EXCHANGE.format("test_trainer_trains_on_each_sequence_once[*:d2]"),
)
def statistics_over_the_default_group(right: Function) -> Function:
    """Statistics are gathered over the default process group, where a rank that is lost is not noticed."""

    def wrong(self: Any, value: Any) -> list[Any]:
        dist.all_gather_object(values := [None] * dist.get_world_size(), value)
        return values

    return wrong


@mutant(
    "areal.trainer.rollout.plan:Plan.too_many_rejected",
    RUNNER.format("test_keep_that_rejects_too_many_groups_raises"),
)
def keep_without_bound(right: Function) -> Function:
    """Groups are played until enough are kept, even if none ever is."""
    return lambda self, rejected, per_batch: None


@mutant(
    "areal.inference.local.sampler:end_tokens",
    "unit/inference/local/test_local.py::test_models_end_of_sequence_tokens_end_a_completion_by_default[True]",
)
def end_of_sequence_ignored(right: Function) -> Function:
    """An answer goes on after the model's end-of-sequence token."""
    return lambda model: ()


@mutant(
    "areal.inference.stop_strings:StopStrings.end",
    "unit/inference/local/test_stop.py::test_window_finds_what_the_whole_text_has[0]",
)
def stop_strings_within_one_token(right: Function) -> Function:
    """A stop string is found only if one token has all of it."""
    return lambda self, tokens: right(self, tokens[-1:])


@mutant(
    "areal.inference.local.adapter_router:AdapterRouter._rows_of",
    ADAPTERS.format("test_each_request_has_the_weights_of_its_adapter[tied]"),
    SNAPSHOTS.format("test_many_snapshots_are_served_at_once"),
)
def adapter_of_another_request(right: Function) -> Function:
    """Requests in one forward have the adapters of their neighbours."""
    return lambda self, adapters, lengths: right(self, [*adapters[1:], adapters[0]], lengths)


@mutant(
    "areal.inference.local.adapter_router:AdapterRouter._rows_of",
    ADAPTERS.format("test_each_request_has_the_weights_of_its_adapter[split-prompts]"),
)
def adapter_on_one_token_per_request(right: Function) -> Function:
    """An adapter is applied as if each request had one token in a forward."""
    return lambda self, adapters, lengths: right(self, adapters, [min(length, 1) for length in lengths])


@mutant(
    "areal.inference.local.shared_prompts:keyed_tokens",
    ADAPTERS.format("test_each_request_has_the_weights_of_its_adapter[untied]"),
    SNAPSHOTS.format("test_session_keeps_the_weights_that_it_was_created_from"),
)
def prefix_shared_across_adapters(right: Function) -> Function:
    """A prompt computed with one adapter is used by requests of another, and of the model itself."""
    return lambda tokens, number, vocab: tokens


@mutant(
    "areal.inference.local.shared_prompts:adapter_of",
    ADAPTERS.format("test_prompt_is_shared_by_requests_of_one_adapter_only"),
)
def blocks_registered_for_the_model(right: Function) -> Function:
    """Blocks are registered as if requests had no adapter."""
    return lambda name: None


@mutant(
    "areal.inference.local.served_adapters:ServedAdapters._free",
    ADAPTERS.format("test_removed_adapter_serves_running_requests_and_frees_its_memory"),
)
def removed_adapter_keeps_its_memory(right: Function) -> Function:
    """The factors of a removed adapter stay on the device."""
    return lambda self, adapter: None


@mutant(
    "areal.inference.local.continuous_batching:_WakeUp.wait",
    SNAPSHOTS.format("test_idle_generator_does_nothing"),
)
def idle_generator_polls(right: Function) -> Function:
    """An idle generator looks for requests ten times per second."""
    return lambda self, timeout=None: threading.Event.wait(self, timeout)


@mutant(
    "areal.tinker.backends.sampling.local_sampler:with_seeds",
    SAMPLER.format("test_answer_of_a_seed_is_the_same_whatever_else_runs"),
)
def one_seed_for_all_answers(right: Function) -> Function:
    """All answers to a request have its seed, and are equal."""

    def wrong(sampling: Any, request: Any) -> Any:
        return [dataclasses.replace(sampling, seed=request.seed)] * request.num_samples

    return wrong


@mutant(
    "areal.tinker.backends.sampling.local_sampler:check_adapter_base",
    SNAPSHOTS.format("test_bad_snapshots_are_user_errors[of another base*]"),
)
def adapter_of_another_base_served(right: Function) -> Function:
    """An adapter of another base model of the same shape is served."""
    return lambda folder, model: None


@mutant(
    "areal.tinker.backends.sampling.local_sampler:LocalSampler._is_finite",
    SNAPSHOTS.format("test_snapshot_of_a_diverged_adapter_is_refused[nan]"),
)
def diverged_adapter_served(right: Function) -> Function:
    """An adapter whose log-probs are not finite is served."""

    async def wrong(self: Any, name: str) -> bool:
        return True

    return wrong


@mutant(
    "areal.inference.local.sampler:RequestSampler._fail",
    SNAPSHOTS.format("test_request_without_a_distribution_fails_alone"),
)
def broken_logits_sampled(right: Function) -> Function:
    """A request whose logits are not finite goes on."""
    return lambda self, name, logprob: None


@mutant(
    "areal.tinker.backends.sampling.vllm.http_sampler:VLLMSampler._drop",
    HTTP_SAMPLER.format("test_two_snapshots_and_the_model_at_once_have_the_log_probs_of_the_engine"),
)
def released_adapters_kept_on_the_server(right: Function) -> Function:
    """Released adapters stay on the inference server."""

    async def wrong(self: Any, served: Any) -> None:
        return None

    return wrong


@mutant(
    "areal.tinker.backends.sampling.vllm.http_sampler:VLLMSampler._pick",
    "unit/tinker/backends/vllm/test_http_sampler_failures.py::test_requests_go_to_another_server_while_one_is_gone",
)
def no_other_server_is_asked(right: Function) -> Function:
    """An answer fails with the server that was asked first."""
    return lambda self: (right(self)[0], True)


@mutant(
    "areal.tinker.backends.sampling.vllm.http_sampler:check_supported",
    HTTP_SAMPLER.format("test_requests_that_cannot_be_served_are_refused_by_name*"),
)
def prompt_scored_at_another_temperature(right: Function) -> Function:
    """Log-probs of a prompt at temperature 1 are returned for any temperature."""
    return lambda request: None


@mutant(
    "areal.inference.http.group.sender:GroupSender._recover",
    GROUP.format("test_next_update_heals_servers_that_were_interrupted_by_the_source[*q_proj*]"),
    GROUP.format("test_next_update_heals_servers_of_which_one_refused_a_tensor"),
)
def interrupted_servers_start_again(right: Function) -> Function:
    """The next update goes to a server with the tensors of an interrupted one."""
    return lambda self, urls: None


@mutant(
    "areal.inference.http.group.chunk:_Builder.add",
    GROUP.format("test_packed_buffers_end_after_the_tensor_that_exceeds_their_size"),
)
def packed_buffer_cut_before_the_tensor(right: Function) -> Function:
    """A packed buffer ends before the tensor that exceeds its size, where the receiver expects the end after it."""

    def wrong(self: Any, name: str, tensor: Any) -> None:
        if self._packed_bytes is not None and self.open_bytes and self.open_bytes + tensor.nbytes > self._packed_bytes:
            self.close()
        right(self, name, tensor)

    return wrong


@mutant(
    "areal.inference.http.group.chunk:cut_chunks",
    GROUP.format("test_all_workers_of_all_servers_have_the_weights_of_each_update[500-None]"),
)
def tensors_taken_before_they_are_copied(right: Function) -> Function:
    """Tensors are copied into a chunk after the source has yielded the next ones."""
    return lambda tensors, *arguments: right(list(tensors), *arguments)


@mutant(
    "areal.inference.http.group.sender:Members.release",
    GROUP.format("test_next_update_heals_servers_that_were_interrupted_by_the_source[*norm*]"),
)
def interrupted_servers_go_on(right: Function) -> Function:
    """Servers whose update was interrupted continue to generate."""
    return lambda self, version, faults: right(self, version, {})


@mutant(
    "areal.weight_sync.nccl:NCCLCommunicator._give_up",
    NCCL.format("test_hanging_broadcast_is_aborted_in_time"),
)
def hanging_communicator_left_alone(right: Function) -> Function:
    """A communicator whose time limit has passed is not aborted, so that its kernel stays on the device."""
    return lambda self: None
