"""Sampling as plain calls: the latest snapshot of each model, and failures alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from areal.tests.unit.tinker.service.fakes import FakeSampling, sample
from areal.tinker.backends.errors import UserError
from areal.tinker.backends.prepared import SamplingResult
from areal.tinker.direct.sampler import DirectSampler, SampleRequest


@pytest.fixture
def backend() -> FakeSampling:
    return FakeSampling()


@pytest.fixture
def opened() -> list[str]:
    """Snapshots whose folder was opened."""
    return []


@pytest.fixture
def sampler(backend: FakeSampling, opened: list[str], tmp_path: Path) -> Iterator[DirectSampler]:
    for number, name in enumerate(("one", "two", "three"), start=1):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.json").write_text(json.dumps({"weight": float(number)}))

    @contextmanager
    def open_folder(name: str) -> Iterator[Path]:
        opened.append(name)
        yield tmp_path / name

    sampler = DirectSampler(backend, open_folder)
    yield sampler
    sampler.close()
    assert backend.closed


def weight(output: list[SamplingResult] | Exception) -> float:
    """Return the weight of the snapshot that has answered."""
    assert isinstance(output, list), output
    return float(output[0].answers[0].logprobs[0])


def ask(model_id: str = "", snapshot: str = "", count: int = 1) -> SampleRequest:
    return SampleRequest(model_id, snapshot, [sample(None, first=5) for _ in range(count)])


def test_latest_snapshot_of_a_model_is_open(sampler: DirectSampler, backend: FakeSampling, opened: list[str]) -> None:
    outputs = sampler.sample({"1": ask("a", "one", 3), "2": ask(), "3": ask("b", "three"), "4": ask("a", "one")})
    assert {name: weight(output) for name, output in outputs.items()} == {"1": 1.0, "2": 0.0, "3": 3.0, "4": 1.0}
    assert isinstance(outputs["1"], list)
    assert len(outputs["1"]) == 3
    assert opened == ["one", "three"]
    assert weight(sampler.sample({"1": ask("a", "two")})["1"]) == 2.0
    assert sampler.snapshots == {"a": "two", "b": "three"}
    assert set(backend.open_snapshots) == {"base", "two", "three"}
    for model in ("a", "b", "never sampled"):
        sampler.release(model)
    assert set(backend.open_snapshots) == {"base"}


def test_refused_request_fails_alone(sampler: DirectSampler, backend: FakeSampling) -> None:
    limit = replace(sample(None, first=5), sampling_params={"top_k": 0})
    outputs = sampler.sample(
        {"1": ask("a", "one"), "2": ask("b", "lost"), "3": ask(count=0), "4": SampleRequest("a", "one", [limit])}
    )
    assert weight(outputs["1"]) == 1.0
    assert isinstance(outputs["2"], OSError)
    for name, message in (("3", "num_samples = 0"), ("4", "top_k is 0")):
        assert isinstance(outputs[name], UserError)
        assert message in str(outputs[name])
    assert sampler.snapshots == {"a": "one"}
