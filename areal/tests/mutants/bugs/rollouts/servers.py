"""Bugs of rollouts on inference servers that the suite must catch, as in :mod:`areal.tests.mutants.bugs.step`."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from areal.inference.http.server_connection import Unavailable
from areal.inference.http.server_state import Serving
from areal.tests.mutants.planting import Function, mutant

OWNER = "unit/inference/http/test_owner.py::test_{}"
MANY = "unit/inference/http/test_many_servers.py::test_{}"
KINDS = "unit/inference/http/test_servers.py::test_{}"
UPDATES = "unit/inference/http/test_server_updates.py::test_{}"
LOST = "unit/inference/http/test_lost_replies.py::test_{}"
ADAPTERS = "unit/inference/http/test_adapter_updates.py::test_{}"


@mutant(
    "areal.inference.http.server:Server.recognise",
    OWNER.format("restart_between_two_requests_is_noticed[completions]"),
)
def restarted_server_not_noticed(right: Function) -> Function:
    """Replies of a new connection count without a look at the server's label."""

    async def wrong(self: Any, **_: Any) -> bool:
        return True

    return wrong


@mutant(
    "areal.inference.http.folder_update:restore_server",
    OWNER.format("restart_between_two_requests_is_noticed[tokens]"),
)
def weights_of_the_start_used_again(right: Function) -> Function:
    """A server that was started anew is used with the weights of its start."""

    async def wrong(server: Any, desired: Any, *_: Any) -> None:
        await server.known_routes(1e18)
        await server._label.give(server.routes, desired().version)
        server.enter(Serving(desired().version))

    return wrong


@mutant(
    "areal.inference.http.folder_update:restore_server",
    MANY.format("server_that_missed_updates_gets_only_the_last_one"),
)
def missed_update_loaded_late(right: Function) -> Function:
    """A server that was away gets the version that it had when it was lost."""

    async def wrong(server: Any, desired: Any, *limits: Any) -> None:
        lost = server.loaded
        await right(server, desired if lost is None else lambda: lost, *limits)

    return wrong


@mutant(
    "areal.inference.http.fleet:Fleet.report", MANY.format("server_that_never_returned_is_not_counted_as_restarted")
)
def missing_server_counted_as_restarted(right: Function) -> Function:
    """A server that cannot be reached counts as restarted."""

    def wrong(self: Any, server: Any) -> None:
        server.restarts += 1
        right(self, server)

    return wrong


@mutant(
    "areal.inference.http.server:Server._claim",
    OWNER.format("server_that_an_ended_owner_left_paused_is_resumed[tokens]"),
    OWNER.format("server_interrupted_in_an_update_of_another_owner_needs_an_update"),
)
def pause_of_an_ended_owner_kept(right: Function) -> Function:
    """Every server is taken as one that was just started."""
    return lambda self, routes, found, *rest: right(self, routes, "default", *rest)


@mutant("areal.inference.http.label:Owner.check", OWNER.format("two_owners_of_one_server_are_refused[tokens]"))
def second_owner_accepted(right: Function) -> Function:
    """An owner takes a server whose owner lives."""
    return lambda self, label: None


@mutant("areal.inference.http.label:ServerLabel.give", MANY.format("requests_run_on_across_updates[tokens]"))
def label_before_the_weights(right: Function) -> Function:
    """The label of a version is set at the end of the pause only for the client: the server keeps the earlier one."""

    async def wrong(self: Any, routes: Any, version: int) -> None:
        if self.given is not None and version:
            self.given = self._owner.label(version)
            return
        await right(self, routes, version)

    return wrong


@mutant(
    "areal.inference.http.label:ServerLabel.insist",
    LOST.format("request_of_an_update_is_repeated*update_weight_version*"),
)
def lost_label_ends_the_update(right: Function) -> Function:
    """A label whose reply is lost is an error of the update."""

    async def wrong(self: Any, routes: Any, version: int, seconds: float) -> None:
        await self.give(routes, version)

    return wrong


@mutant(
    "areal.inference.http.label:ServerLabel.insist",
    LOST.format("server_started_anew_between_load_and_label_loads_again"),
)
def label_set_without_a_look(right: Function) -> Function:
    """A label is repeated after a lost reply, also on a server that was started anew since the load."""

    async def wrong(self: Any, routes: Any, version: int, seconds: float) -> None:
        while True:
            try:
                return await self.give(routes, version)
            except RuntimeError:
                await asyncio.sleep(0.05)

    return wrong


@mutant("areal.inference.http.updates:Completeness.check", OWNER.format("directory_that_lacks_a_weight*"))
def partial_weights_loaded(right: Function) -> Function:
    """A directory that lacks a weight is loaded."""
    return lambda self, folder, **options: None


@mutant(
    "areal.inference.http.server_connection:ServerConnection._check_health",
    KINDS.format("answer_of_a_healthy_server_may_take_longer_than_timeout_and_deadline[vllm]"),
)
def long_answer_given_up(right: Function) -> Function:
    """The time limit is one on the length of an answer."""

    async def wrong(self: Any, route: str, silence: float) -> None:
        raise Unavailable(f"{self.url}{route}: no answer within {silence:.3g} s")

    return wrong


@mutant("areal.inference.http.fleet:Affinity.find", MANY.format("answers_of_one_prompt_share_a_server"))
def prefixes_forgotten(right: Function) -> Function:
    """Requests go to the server with the fewest requests only."""
    return lambda self, prompt: None


@mutant("areal.inference.http.fleet:Fleet._give_up", MANY.format("server_killed_during_an_update_and_back"))
def update_waits_for_dead_servers(right: Function) -> Function:
    """An update of the others waits for a server that is gone."""
    return lambda self, pending: None


@mutant(
    "areal.inference.http.updates:WeightUpdates.check",
    ADAPTERS.format("update_of_the_model_under_an_adapter_is_refused"),
)
def model_updated_under_an_adapter(right: Function) -> Function:
    """Merged weights are sent to servers that add the adapter to them."""
    return lambda self: None


@mutant(
    "areal.inference.http.servers.vllm:VLLMTokenRoutes.__init__",
    "unit/inference/http/test_adapter_updates.py::test_request_under_way_goes_on_with_the_next_adapter",
)
def adapter_changes_under_requests(right: Function) -> Function:
    """Requests run on across an update of an adapter, with the one before, under the label of the next one."""

    def wrong(self: Any, model: Any, adapter: Any, served: Any, **options: Any) -> None:
        right(self, model, None, served, **options)
        self._adapter = adapter

    return wrong


@mutant(
    "areal.inference.http.group.sender:Members.lost",
    "unit/inference/group/test_rollouts.py::test_server_that_dies_in_an_update_does_not_take_the_others_with_it[0-/update_weights-3]",
)
def update_dies_with_a_server(right: Function) -> Function:
    """A server that dies in an update over a process group takes the weights of the others with it."""
    return lambda self: ([], 0)


@mutant(
    "areal.inference.http.servers.vllm:VLLMTokenRoutes.generate",
    "unit/inference/http/test_stop_and_top.py::test_most_likely_tokens_are_there_where_another_one_was_sampled[tokens]",
)
def sampled_token_counts_as_most_likely(right: Function) -> Function:
    """A server is asked for as many tokens as wanted, of which the sampled one takes the place of the last."""

    def wrong(self: Any, *args: Any) -> Any:
        call = right(self, *args)
        params = call.body.sampling_params
        fewer = params.model_copy(update={"logprobs": max(params.logprobs - 1, 0)})
        return replace(call, body=call.body.model_copy(update={"sampling_params": fewer}))

    return wrong


@mutant(
    "areal.inference.http.folder_update:_interrupt",
    OWNER.format("requests_on_a_restarted_server_are_interrupted_before_it_loads[completions]"),
)
def restarted_server_loads_under_its_requests(right: Function) -> Function:
    """A server that was started anew loads weights while its requests go on."""

    async def wrong(server: object, seconds: float) -> None:
        pass

    return lambda server, seconds: wrong(server, seconds)
