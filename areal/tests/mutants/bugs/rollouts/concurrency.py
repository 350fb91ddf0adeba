"""Bugs of the requests that a server gets at once that the suite must catch, as in :mod:`areal.tests.mutants.bugs.step`."""

from __future__ import annotations

from typing import Any

from areal.tests.mutants.planting import Function, mutant

LIMIT = "unit/inference/http/test_concurrency.py::test_{}"
CONNECTION = "unit/inference/http/test_http_connection.py::test_{}"


@mutant(
    "areal.inference.http.concurrency_limit:ConcurrencyLimit._compare",
    LIMIT.format("limit_has_the_throughput_of_the_best_fixed_one[16 slots]"),
    LIMIT.format("limit_follows_a_server_that_becomes_slower_and_faster"),
)
def smaller_limit_kept_without_throughput(right: Function) -> Function:
    """A smaller limit is kept although it costs throughput."""

    def wrong(self: Any, throughput: float) -> None:
        right(self, throughput * 2 if self.value < self._kept else throughput)

    return wrong


@mutant(
    "areal.inference.http.concurrency_limit:ConcurrencyLimit.note",
    LIMIT.format("limit_stays_with_less_to_do"),
)
def idle_server_measured(right: Function) -> Function:
    """Replies of a server that could have more requests count."""
    return lambda self, began, tokens, in_flight: right(self, began, tokens, int(self.value))


@mutant(
    "areal.inference.http.concurrency_limit:ConcurrencyLimit.note",
    LIMIT.format("requests_that_began_before_the_measurement_do_not_count"),
)
def requests_of_the_limit_before_count(right: Function) -> Function:
    """Requests that began under the limit before count."""
    return lambda self, began, tokens, in_flight: right(self, max(began, self._start or 0.0), tokens, in_flight)


@mutant(
    "areal.inference.http.waiting_line:WaitingLine.wake",
    LIMIT.format("answer_that_was_chosen_has_its_place"),
)
def place_given_twice(right: Function) -> Function:
    """An answer is chosen for the place of one that was chosen and has not gone on yet."""
    return lambda self, count=float("inf"): self._choose(count)


@mutant(
    "areal.inference.http.fleet:Fleet._ready",
    LIMIT.format("two_thousand_requests_at_once_on_sixteen_servers"),
)
def limit_of_a_server_ignored(right: Function) -> Function:
    """A server gets requests beyond its limit."""
    return lambda self: list(self.servers)


@mutant(
    "areal.inference.http.server_connection:HTTPConnection.close",
    CONNECTION.format("request_without_a_reply_ends_with_its_connection"),
)
def cancelled_request_goes_on(right: Function) -> Function:
    """The connection of a cancelled request stays open, and the server generates the answer."""

    def wrong(self: Any) -> None:
        self.is_free = False

    return wrong
