"""Bugs of client processes that the suite must catch, as in :mod:`areal.tests.mutants.bugs.step`."""

from __future__ import annotations

from areal.inference.http.clients.channel import Cancel
from areal.tests.mutants.planting import Function, mutant

CLIENTS = "unit/inference/http/test_client_processes.py::test_{}"


@mutant(
    "areal.inference.http.clients.channel:Channel.send",
    CLIENTS.format("cancelled_answer_is_aborted_on_the_server"),
)
def cancelled_answer_goes_on_in_its_process(right: Function) -> Function:
    """A client process is not told that an answer was cancelled."""
    return lambda self, message: None if isinstance(message, Cancel) else right(self, message)


@mutant(
    "areal.inference.http.clients.client_pool:ClientPool.choose",
    CLIENTS.format("answers_and_updates_are_those_of_one_process[tokens]"),
)
def one_process_has_all_requests(right: Function) -> Function:
    """The second process gets no requests."""
    return lambda self: next((each for each in self._clients if not each.lost), None)
