"""The log of an engine: one record on the first rank that says what was applied."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from transformers import AutoConfig

from areal.engine import state
from areal.tests.grid.models import tiny_model
from areal.tests.grid.reference import Reference
from areal.tests.harness.tiny import family_dir, started
from areal.tests.harness.world import world

ITEMS = (
    *("layout", "sharding", "attention kernel", "activation checkpointing"),
    *("compile", "gradient reduction", "precision", "parameters", "communication"),
)


class Collected(logging.Handler):
    """Messages of the engine's logger. The fixture ``caplog`` cannot be sent to other processes."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def messages_of(backend: str, **changes: object) -> list[str]:
    """Messages that an engine logs over its life."""
    handler, level = Collected(), state.logger.level
    state.logger.addHandler(handler)
    state.logger.setLevel(logging.INFO)
    try:
        with started(backend, **changes):
            pass
    finally:
        state.logger.removeHandler(handler)
        state.logger.setLevel(level)
    return handler.messages


def items(message: str) -> dict[str, str]:
    """The items of a message by name."""
    _, *lines = message.splitlines()
    return dict(line.strip().split(": ", 1) for line in lines)


@pytest.mark.world(1)
@pytest.mark.parametrize("backend", ["fsdp:d1", "megatron:d1"])
def test_an_engine_logs_once_what_it_applied(backend: str) -> None:
    path = family_dir("llama")
    n_parameters = sum(x.numel() for x in Reference(path).model.parameters())
    (message,) = messages_of(backend, path=path, activation_checkpointing="full")
    applied = items(message)
    assert set(applied) == {*ITEMS, *(["fused layers"] if backend.startswith("fsdp") else [])}
    assert applied["layout"].startswith(f"{backend}, ranks: 1, ")
    assert applied["activation checkpointing"].startswith("full")
    assert applied["precision"].startswith("compute in float32")
    assert applied["parameters"] == f"{n_parameters:,} in total, {n_parameters:,} on rank 0"


@pytest.mark.world(1)
def test_the_log_names_compilation_and_rows() -> None:
    fsdp = {"compile": True, "compile_backend": "eager", "attention": "rows"}
    (message,) = messages_of("fsdp:d1", path=family_dir("llama"), fsdp=fsdp)
    assert items(message)["compile"] == "each layer, backend eager"
    assert "one sequence per row" in items(message)["attention kernel"]


@pytest.mark.world(1)
def test_the_log_names_plain_operations_of_soft_caps(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = AutoConfig.for_model("gemma2", vocab_size=32, num_hidden_layers=1, head_dim=8, **sizes)
    tiny_model(config, seed=0).save_pretrained(tmp_path)
    (message,) = messages_of("fsdp:d1", path=str(tmp_path))
    assert items(message)["attention kernel"] == "plain operations in blocks, packed sequences"


@pytest.mark.world(2)
@pytest.mark.parametrize("backend", ["fsdp:d2", "fsdp:t2", "fsdp:p2", "megatron:d2", "megatron:t2"])
def test_the_first_rank_alone_logs(backend: str) -> None:
    path = family_dir("llama")
    messages = messages_of(backend, path=path)
    assert len(messages) == (world().rank == 0)
    n_parameters = sum(x.numel() for x in Reference(path).model.parameters())
    for message in messages:
        assert items(message)["parameters"].startswith(f"{n_parameters:,} in total, ")
