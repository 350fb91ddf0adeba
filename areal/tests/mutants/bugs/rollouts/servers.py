"""Bugs of rollouts on inference servers that the suite must catch, as in :mod:`areal.tests.mutants.bugs.step`."""

from __future__ import annotations

from typing import Any

from areal.tests.mutants.planting import Function, mutant

OWNER = "unit/inference/http/test_owner.py::test_{}"
MANY = "unit/inference/http/test_many_servers.py::test_{}"
UPDATES = "unit/inference/http/test_server_updates.py::test_{}"
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
    "areal.inference.http.server:Server.restore",
    OWNER.format("restart_between_two_requests_is_noticed[tokens]"),
)
def weights_of_the_start_used_again(right: Function) -> Function:
    """A server that was started anew is used with the weights of its start."""

    async def wrong(self: Any, current: Any, times: Any) -> None:
        await self._known_routes(1e18)
        await self._label.give(self.routes, current[1])
        self.version, self.is_new = current[1], False

    return wrong


@mutant("areal.inference.http.owner:Owner.check", OWNER.format("two_owners_of_one_server_are_refused[tokens]"))
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


@mutant("areal.inference.http.completeness:Completeness.check", OWNER.format("directory_that_lacks_a_weight*"))
def partial_weights_loaded(right: Function) -> Function:
    """A directory that lacks a weight is loaded."""
    return lambda self, folder: None


@mutant("areal.inference.http.prefix_affinity:Affinity.find", MANY.format("answers_of_one_prompt_share_a_server"))
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
