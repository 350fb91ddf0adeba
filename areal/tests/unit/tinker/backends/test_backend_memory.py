"""Memory of the training backend: passes that do not fit are refused, the memory of a pass returns, and a base model is there once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from areal.api import MicroBatchSpec, ParallelDims
from areal.tests.grid.models import model_dir
from areal.tests.unit.tinker.backends.conftest import Start
from areal.tests.unit.tinker.backends.reference import data, gradients, request, run, same, trained
from areal.tests.unit.tinker.backends.sampling import ENDLESS, PROMPT, SETTINGS
from areal.tinker.backends.backend_registry import share_base_model
from areal.tinker.backends.errors import UserError
from areal.tinker.backends.prepared import AdapterSpec, SamplingRequest
from areal.tinker.backends.sampling.local_sampler import LocalSampler, create
from areal.tinker.backends.training import engine_backend, pass_memory
from areal.tinker.backends.training.adapter_memory import RankMemory, rank_memory
from areal.tinker.backends.training.engine_backend import EngineBackend
from areal.tinker.backends.training.pass_memory import FEW_TOKENS, PassMemory
from areal.utils.profiling import host_memory

LONG = [200] * 6
"""Lengths of the samples of a pass that is measured."""


@pytest.fixture(scope="module")
def large(start: Start) -> EngineBackend:
    """A backend that puts all samples into one micro-batch, with the model ``a``."""
    made = start(max_tokens_per_mb=8192)
    trained(made, "a")
    return made


def needed(backend: EngineBackend, lengths: list[int]) -> int:
    """Return the bytes that a pass needs by what was measured."""
    memory = backend._pass_memory[True]
    return memory._nbytes.needed(memory.tokens_at_once(lengths))


def test_pass_that_does_not_fit_is_refused(large: EngineBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = data("weights", lengths=LONG)
    run(large, request("a", samples))
    before = gradients(large, "a")
    assert needed(large, LONG) > 2**20
    # The gradients and moments that other adapters will have are not free.
    for number in range(8):
        large.create_model(f"other {number}", AdapterSpec(8, seed=number))
    [missing] = (memory.missing for memory in large.group.run(rank_memory))
    assert missing > 2**18
    free = needed(large, LONG) + missing
    monkeypatch.setattr(host_memory, "available_bytes", lambda: free - 2**17)
    [refused] = large.forward_backward([request("a", samples)])
    assert isinstance(refused, UserError)
    assert "memory is short for a pass with 1200 tokens in one micro-batch" in str(refused)
    assert "send fewer samples at once, or release a model" in str(refused)
    assert same(gradients(large, "a"), before)
    # A smaller pass runs, and so does the refused one once a model is gone.
    run(large, request("a", samples[:4]))
    for number in range(8):
        large.delete(f"other {number}")
    run(large, request("a", samples))


def test_small_passes_run_without_a_question(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = start()
    backend.create_model("a", AdapterSpec(4, seed=0))
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 0)
    run(backend, request("a", data("weights", lengths=[FEW_TOKENS])))
    [refused] = backend.forward_backward([request("a", data("weights", lengths=[FEW_TOKENS, 1]))])
    assert "memory is short" in str(refused)


def test_memory_of_a_large_pass_returns(large: EngineBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = data("weights", lengths=[200] * 20)
    run(large, request("a", samples))
    host_memory.trim()
    before = host_memory.resident_bytes()
    assert before is not None
    host_memory.reset_peak()
    # Threshold of a model that is a million times as large.
    monkeypatch.setattr("areal.tinker.backends.training.pass_memory._RETURNED_BYTES", 0)
    run(large, request("a", samples))
    peak, after = host_memory.resident_bytes(peak=True), host_memory.resident_bytes()
    assert peak is not None
    assert after is not None
    assert peak - before > 8 * 2**20
    assert after - before < (peak - before) / 4


@pytest.mark.parametrize(
    ("backend", "lengths", "tokens"),
    [
        ("fsdp:d1", [100, 300], 400),
        ("fsdp:d1", [600, 600], 1000),
        ("fsdp:d1", [4000, 10], 4000),
        ("fsdp:d4", [100] * 8, 300),
        ("fsdp:c2", [100, 101], 101),
        ("fsdp:d2t2", [2000, 10], 2000),
    ],
)
def test_tokens_of_the_largest_micro_batch(backend: str, lengths: list[int], tokens: int) -> None:
    class Group:
        dims = ParallelDims.parse(backend)

    assert PassMemory(Group(), 1000, lambda tokens: None).tokens_at_once(lengths) == tokens  # type: ignore[arg-type]


class Ranks:
    """Ranks of which a pass takes 600 MB for weights, and 30 kB for each token.

    Args:
        free: bytes that are free.
        late: at another moment it takes 100 MB, and so many bytes for each token.

    Attributes:
        passes: tokens of the passes that have run.
    """

    dims = ParallelDims.parse("fsdp:d1")

    def __init__(self, free: int, late: int) -> None:
        self.free, self.late, self.peak, self.passes = free, late, 0, list[int]()

    def run(self, function: Callable[..., Any]) -> list[Any]:
        if function is pass_memory._begin:
            self.peak = 0
        values = {pass_memory._begin: 0, pass_memory._peak: self.peak, rank_memory: RankMemory(0, 0, self.free)}
        return [values.get(function)]

    def bytes_of(self, tokens: int) -> int:
        return max(600_000_000 + 30_000 * tokens, 100_000_000 + self.late * tokens)

    def compute(self, tokens: int) -> None:
        self.passes.append(tokens)
        self.peak = self.bytes_of(tokens)


@pytest.mark.parametrize("late", [0, 120_000])
@pytest.mark.parametrize("megabytes", [650, 1000, 1300, 2000, 3000])
@pytest.mark.parametrize("tokens", [700, 8000, 16384, 32768])
def test_passes_are_refused_by_what_they_need(tokens: int, megabytes: int, late: int) -> None:
    """In proportion to 512 tokens, 8,000 would need 9.6 GB; they need 0.84 or 1.06. Neither a pass nor a probe exceeds what is free."""
    ranks = Ranks(megabytes * 10**6, late)
    memory = PassMemory(ranks, 8192, ranks.compute)  # type: ignore[arg-type]

    def refused() -> str:
        try:
            memory.run([tokens], lambda: ranks.compute(tokens))
        except UserError as error:
            return str(error)
        return ""

    said, needed = refused(), ranks.bytes_of(tokens)
    if needed > ranks.free:
        assert f"memory is short for a pass with {tokens} tokens" in said
    if needed <= ranks.free / pass_memory._STEP:
        assert not said
    assert (ranks.passes[-1] == tokens) == (not said)
    assert max(map(ranks.bytes_of, ranks.passes)) <= ranks.free
    assert ranks.passes == sorted(ranks.passes)
    assert sum(ranks.passes) < 6 * tokens
    # A refusal is known from then on.
    before = len(ranks.passes)
    assert bool(refused()) == bool(said)
    assert len(ranks.passes) == before + (not said)


def test_passes_of_which_many_fit_need_no_large_probe() -> None:
    ranks = Ranks(20 * 10**9, late=0)
    PassMemory(ranks, 8192, ranks.compute).run([8192], lambda: ranks.compute(8192))  # type: ignore[arg-type]
    assert ranks.passes == [256, 512, 8192]


@pytest.mark.parametrize(
    ("backend", "lengths"),
    [
        pytest.param("fsdp:d1", [300, 212], id="one rank"),
        pytest.param("fsdp:d2", [300, 212] * 2, id="data parallel"),
        pytest.param("fsdp:c2", [300, 300, 300, 124], id="context parallel"),
        pytest.param("megatron:p4", [300, 212] * 4, id="pipeline"),
        pytest.param("megatron:p2v2", [300, 212] * 4, id="interleaved pipeline"),
    ],
)
def test_each_rank_computes_the_tokens_of_a_probe(
    backend: str, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []

    def run_passes(group: Any, names: Any, passes: list[Any], *, train: bool, mb_spec: MicroBatchSpec) -> None:
        found.extend(len(sample["input_ids"]) for sample in passes[0].samples)
        assert mb_spec.max_tokens_per_mb == 512 * group.dims.cp

    monkeypatch.setattr(engine_backend, "run_passes", run_passes)
    group, limits = SimpleNamespace(dims=ParallelDims.parse(backend)), SimpleNamespace(max_tokens=300)
    backend_of_group: Any = SimpleNamespace(group=group, _names=[], _limits=limits)
    EngineBackend._probe(backend_of_group, True, 512)
    assert found == lengths


async def logprobs(sampler: LocalSampler) -> list[np.ndarray[Any, Any]]:
    await sampler.open("base", None)
    result = await sampler.sample("base", SamplingRequest(PROMPT, 1, 12, seed=3, prompt_logprobs=True, **ENDLESS))
    assert result.prompt_logprobs is not None
    return [result.prompt_logprobs, result.answers[0].logprobs]


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_sampler_reads_the_engines_base_model(family: str, start: Start) -> None:
    path = model_dir(family)
    backend = start(model=path)

    async def work() -> None:
        sampler = create(path, SETTINGS)
        try:
            before = await logprobs(sampler)
            own = {name: x.data_ptr() for name, x in sampler.rollout.model.named_parameters()}
            share_base_model(backend, sampler)
            lent = {name: x.data_ptr() for name, x in backend.base_parameters().items()}
            shared = {name: x.data_ptr() for name, x in sampler.rollout.model.named_parameters()}
            assert shared == lent
            assert not set(shared.values()) & set(own.values())
            # Training changes adapters, and not the base model.
            trained(backend, "a", mlp=family == "qwen3")
            for ours, theirs in zip(before, await logprobs(sampler), strict=True):
                np.testing.assert_allclose(theirs, ours, atol=2e-6)
        finally:
            await sampler.close()

    asyncio.run(work())


@pytest.mark.parametrize(
    ("backend", "dtype"), [("fsdp:d1", "bfloat16"), ("megatron:d1", "float32")], ids=["other dtype", "other form"]
)
def test_other_weights_are_not_shared(backend: str, dtype: str, start: Start) -> None:
    training, path = start(backend), model_dir("qwen3")

    async def work() -> None:
        sampler = create(path, {**SETTINGS, "dtype": dtype})
        try:
            assert sampler.borrow(training.base_parameters()) == 0
        finally:
            await sampler.close()

    asyncio.run(work())
