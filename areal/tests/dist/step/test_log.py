"""The log of an engine: one record on the first rank that says what was applied."""

from __future__ import annotations

import logging

import pytest

from areal.engine import state
from areal.tests.grid.reference import Reference
from areal.tests.harness.tiny import family_dir, started
from areal.tests.harness.world import world

ITEMS = (
    *("layout", "sharding", "attention kernel", "activation checkpointing"),
    *("compile", "precision", "parameters", "communication"),
)


def records(caplog: pytest.LogCaptureFixture, backend: str, **changes: object) -> list[str]:
    """Messages that an engine logs over its life."""
    caplog.clear()
    with caplog.at_level(logging.INFO, logger=state.__name__), started(backend, **changes):
        pass
    return [record.getMessage() for record in caplog.records if record.name == state.__name__]


def items(message: str) -> dict[str, str]:
    """The items of a message by name."""
    _, *lines = message.splitlines()
    return dict(line.strip().split(": ", 1) for line in lines)


@pytest.mark.world(1)
@pytest.mark.parametrize("backend", ["fsdp:d1", "megatron:d1"])
def test_an_engine_logs_once_what_it_applied(caplog: pytest.LogCaptureFixture, backend: str) -> None:
    path = family_dir("llama")
    n_parameters = sum(x.numel() for x in Reference(path).model.parameters())
    (message,) = records(caplog, backend, path=path, activation_checkpointing="full")
    applied = items(message)
    assert set(applied) == set(ITEMS)
    assert applied["layout"].startswith(f"{backend}, ranks: 1, ")
    assert applied["activation checkpointing"].startswith("full")
    assert applied["precision"].startswith("compute in float32")
    assert applied["parameters"] == f"{n_parameters:,} in total, {n_parameters:,} on rank 0"


@pytest.mark.world(1)
def test_the_log_names_compilation_and_rows(caplog: pytest.LogCaptureFixture) -> None:
    fsdp = {"compile": True, "compile_backend": "eager", "attention": "rows"}
    (message,) = records(caplog, "fsdp:d1", path=family_dir("llama"), fsdp=fsdp)
    assert items(message)["compile"] == "each layer, backend eager"
    assert "one sequence per row" in items(message)["attention kernel"]


@pytest.mark.world(2)
@pytest.mark.parametrize("backend", ["fsdp:d2", "fsdp:t2", "fsdp:p2", "megatron:d2", "megatron:t2"])
def test_the_first_rank_alone_logs(caplog: pytest.LogCaptureFixture, backend: str) -> None:
    path = family_dir("llama")
    messages = records(caplog, backend, path=path)
    assert len(messages) == (world().rank == 0)
    n_parameters = sum(x.numel() for x in Reference(path).model.parameters())
    for message in messages:
        assert items(message)["parameters"].startswith(f"{n_parameters:,} in total, ")
