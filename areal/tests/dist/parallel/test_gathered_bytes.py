"""Weights that are streamed in a narrower dtype: shards are cast before they are gathered, and the bits are those of a cast afterwards."""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn

from areal.api import LoRAConfig, NamedTensor
from areal.api.weights import stream_of
from areal.tests.dist.parallel.collective_bytes import Traffic, streamed
from areal.tests.grid.models import model_dir
from areal.tests.harness.tiny import chosen, global_batch, local_batch, loss, same_bits, started, weights_of
from areal.tests.harness.world import record, world
from areal.utils.dtensor import gathered_dtype
from areal.weight_sync import DirectTransport, ModuleSource
from areal.weight_sync.transport import TensorTransport


@pytest.mark.parametrize(
    "backend",
    chosen("fsdp:d2", "fsdp:t2", "fsdp:p2", "fsdp:e2", "megatron:t2", "megatron:p2", "fsdp:d2t2"),
)
def test_half_the_bytes_and_the_same_bits(backend: str) -> None:
    with started(backend, path=model_dir("qwen3_moe" if "e2" in backend else "qwen3")) as engine:
        exact, all_bytes = streamed(engine, None)
        halves, bytes_of_halves = streamed(engine, torch.bfloat16)
        wide, bytes_of_wide = streamed(engine, torch.float64)
    record("bytes of collectives in a stream of weights", backend, float32=all_bytes, bfloat16=bytes_of_halves)
    assert same_bits(halves, {name: x.bfloat16() for name, x in exact.items()})
    assert same_bits(wide, {name: x.double() for name, x in exact.items()})
    # Buckets of megatron are filled up to whole integers.
    assert 0 < bytes_of_halves <= all_bytes / 2 + 64
    assert bytes_of_wide == all_bytes


@pytest.mark.parametrize("backend", chosen("fsdp:d2", "megatron:t2", "jax:d2"))
def test_adapter_is_merged_before_the_cast(backend: str) -> None:
    with started(backend, lora=LoRAConfig(rank=3, alpha=64.0), master_dtype="float32") as engine:
        base = weights_of(engine)
        engine.train_batch(local_batch(engine, global_batch()), loss)
        exact, all_bytes = streamed(engine, None)
        halves, bytes_of_halves = streamed(engine, torch.bfloat16)
    assert any(not torch.equal(x, exact[name]) for name, x in base.items())
    assert same_bits(halves, {name: x.bfloat16() for name, x in exact.items()})
    # The embedding and the head have no adapter.
    assert backend == "jax:d2" or bytes_of_halves < all_bytes


@pytest.mark.parametrize("backend", chosen("fsdp:d2"))
def test_transport_lets_the_engine_cast(backend: str) -> None:
    class Kept:
        def transfer(self, tensors: Any) -> None:
            self.tensors = {name: x.clone() for name, x in tensors}

        def __getattr__(self, name: str) -> Any:
            return lambda *_: None

    with started(backend) as engine:
        exact, all_bytes = streamed(engine, None)
        sender: Any = Kept() if engine.control.rank == 0 else None
        with Traffic() as traffic:
            meta = TensorTransport(engine.control, sender, cast=torch.bfloat16).send(engine, 1)
        if sender is not None:
            assert same_bits(sender.tensors, {name: x.bfloat16() for name, x in exact.items()})
        assert 0 < traffic.nbytes == all_bytes / 2
        assert meta.nbytes == sum(x.nbytes for x in exact.values()) / 2
        # Ranks that would gather shards of two dtypes are told before the gather.
        cast = torch.bfloat16 if engine.control.rank == 0 else None
        with pytest.raises(ValueError, match=r"cast = \[torch.bfloat16, None\].*the same dtype on all"):
            TensorTransport(engine.control, None, cast=cast).send(engine, 2)
        direct = DirectTransport(engine.control, None)
        with pytest.raises(StopIteration):
            direct.send(engine, 2)


@pytest.mark.parametrize("backend", chosen("jax:d2", "jax:t2"))
def test_jax_gathers_integers_of_two_bytes(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = import_module("areal.engine.jax.weights")
    collectives = import_module("areal.plan.compiled_collectives").collectives
    gathered: list[tuple[str, int]] = []

    def recording(program: Any) -> Any:
        def run(*args: Any) -> Any:
            for each in collectives(program.lower(*args).compile().as_text()):
                gathered.append((each.dtype, math.prod(each.shape)))
            return program(*args)

        return run

    for name in ("_row", "_everywhere"):
        monkeypatch.setattr(weights, name, recording(getattr(weights, name)))
    with started(backend) as engine:
        exact, _ = streamed(engine, None)
        whole, gathered = gathered, []
        halves, _ = streamed(engine, torch.bfloat16)
    assert same_bits(halves, {name: x.bfloat16() for name, x in exact.items()})
    assert {dtype for dtype, _ in whole} == {"f32"}
    assert {dtype for dtype, _ in gathered} == {"u16"}
    assert [n for _, n in gathered] == [n for _, n in whole]
    assert sum(n for _, n in gathered) > 0.8 * sum(x.numel() for x in exact.values()), world().size


@pytest.mark.parametrize(
    ("own", "wanted", "expected"),
    [
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.float64, torch.float32, torch.float32),
        (torch.float32, None, torch.float32),
        (torch.bfloat16, torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float16, torch.bfloat16),
        (torch.int64, torch.bfloat16, torch.int64),
        (torch.float32, torch.float8_e4m3fn, torch.float32),
    ],
)
def test_shards_are_gathered_in_the_narrower_dtype(
    own: torch.dtype, wanted: torch.dtype | None, expected: torch.dtype
) -> None:
    assert gathered_dtype(own, wanted) is expected


def test_source_without_a_dtype_yields_its_own() -> None:
    module = nn.Linear(2, 3)
    assert {x.dtype for _, x in stream_of(ModuleSource(module), torch.bfloat16)} == {torch.float32}

    class Casting:
        def named_tensors(self, *, dtype: torch.dtype | None = None) -> Iterator[NamedTensor]:
            return iter([NamedTensor("x", torch.zeros(2, dtype=dtype))])

    assert [x.dtype for _, x in stream_of(Casting(), torch.bfloat16)] == [torch.bfloat16]
    assert [x.dtype for _, x in stream_of(Casting(), None)] == [torch.float32]
