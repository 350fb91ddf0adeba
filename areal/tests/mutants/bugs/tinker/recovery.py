"""Bugs of the restoration of live models that the suite must catch."""

from __future__ import annotations

from typing import Any

from areal.tests.mutants.planting import Function, mutant

MODELS = "unit/tinker/service/test_live_models.py::"


@mutant("areal.tinker.service.recovery.recovery:_record", MODELS + "test_killed_servers_change_no_bit*each step]")
def journal_not_cut(right: Function) -> Function:
    """A snapshot claims to contain one request less than it does, which runs again after a restart."""
    return lambda connection, model_id, uid, seq: right(connection, model_id, uid, seq - 1)


@mutant(
    "areal.tinker.service.recovery.recovery:_since",
    MODELS + "test_killed_servers_change_no_bit*",
    MODELS + "test_models_go_on_after_the_loss_of_the_backend",
)
def steps_not_run_again(right: Function) -> Function:
    """A restored model has the gradients of its passes, but not the steps."""

    def wrong(connection: Any, row: Any, end: int) -> list[Any]:
        return [each for each in right(connection, row, end) if each[2] != "optim_step"]

    return wrong


@mutant(
    "areal.tinker.service.store.futures:Futures.note_begun",
    "unit/tinker/service/test_durability.py::test_a_request_that_ends_every_server_loses_its_model_only",
)
def begun_requests_are_not_stored(right: Function) -> Function:
    """A request that ends its server is run again without end."""

    async def wrong(self: Any, seqs: Any) -> None:
        return None

    return wrong
