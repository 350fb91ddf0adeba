"""Bugs of client processes that the suite must catch, as in :mod:`areal.tests.mutants.bugs.step`."""

from __future__ import annotations

from typing import Any

from areal.inference.http.clients.channel import Answered, Cancel
from areal.tests.mutants.planting import Function, mutant

CLIENTS = "unit/inference/http/test_client_processes.py::test_{}"


@mutant(
    "areal.inference.http.clients.channel:Channel.send",
    CLIENTS.format("cancelled_answer_is_aborted_on_the_server"),
)
def cancelled_request_goes_on(right: Function) -> Function:
    """A client process is not told that an answer was cancelled."""
    return lambda self, message: None if isinstance(message, Cancel) else right(self, message)


@mutant(
    "areal.inference.http.clients.client_pool:ClientHandle._take",
    CLIENTS.format("answers_and_updates_are_those_of_one_process[completions]"),
)
def errors_of_servers_taken_for_faults(right: Function) -> Function:
    """The owner takes a rejected request for a failed one."""

    def wrong(self: Any, message: Any) -> None:
        if isinstance(message, Answered) and isinstance(message.result, Exception):
            message = message._replace(result=RuntimeError("failed"))
        right(self, message)

    return wrong


@mutant(
    "areal.inference.http.clients.client_pool:ClientPool.choose",
    CLIENTS.format("answers_and_updates_are_those_of_one_process[tokens]"),
)
def one_process_has_all_requests(right: Function) -> Function:
    """The second process gets no requests."""
    return lambda self: next((each for each in self._clients if not each.lost), None)
