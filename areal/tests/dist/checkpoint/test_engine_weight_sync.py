"""Weight synchronization: a transformers replica gets the trainer's weights, for every registered layout and every transport."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from areal.api import OptimizerConfig, TrainEngine, WeightReceiver
from areal.tests.dist.checkpoint.stages import at_stages
from areal.tests.grid.cell_engine import start_cell
from areal.tests.grid.layouts import LORA, TOLERANCES, Cell, Layout, all_layouts
from areal.tests.grid.models import adapter_dir, model_dir
from areal.tests.harness.tiny import global_batch, layouts, local_batch, loss, same_bits, started, weights_of
from areal.tests.harness.world import world
from areal.utils.distributed import ControlPlane
from areal.weight_sync import (
    DirectTransport,
    DiskReceiver,
    DiskTransport,
    ModuleSource,
)

FILE_BYTES = 20_000
LEARN = OptimizerConfig(lr=0.05)
SENT = (
    *(
        "fsdp:d1",
        "fsdp:d2",
        "fsdp:c2-gather_kv",
        "fsdp:t2",
        "fsdp:p2v2-Interleaved1F1B",
        "fsdp:e2",
        "fsdp:e2p2",
        "fsdp:d2t2",
    ),
    *("megatron:d1", "megatron:d2", "megatron:t2", "megatron:p2v2", "megatron:e2", "megatron:t2p2"),
    *("jax:d1", "jax:d2", "jax:t2"),
)
"""A layout of each kind. What each layout streams is compared with files elsewhere: here, it travels on each way."""

Found = tuple[dict[str, Tensor], list[Tensor]]
"""Return a replica's weights by their Hugging Face names, and its log-probs of each sequence."""


def replica(path: str, dtype: torch.dtype = torch.float32, *, adapter: str | None = None) -> nn.Module:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    if adapter is not None:
        model.load_adapter(adapter)
    return model.eval()


def sent(engine: TrainEngine, adapter: str | None) -> dict[str, Any]:
    """Return what a transport sends: the model or only the adapter."""
    return {"source": engine} if adapter is None else {"source": engine.adapters, "select": lambda name: True}


@torch.no_grad()
def looked_at(module: nn.Module, sequences: list[Tensor]) -> Found:
    weights = {name: tensor.clone() for name, tensor in ModuleSource(module).named_tensors()}
    rows = []
    for ids in sequences:
        scores = module(ids[None], use_cache=False).logits[0].float().log_softmax(-1)
        rows.append(torch.cat([scores[:-1].gather(-1, ids[1:, None])[:, 0], torch.zeros(1)]))
    return weights, rows


def by_direct(
    engine: TrainEngine, path: str, sequences: list[Tensor], folder: Path, adapter: str | None = None
) -> Found:
    module = replica(path, adapter=adapter)
    transport = DirectTransport(engine.control, module)  # type: ignore[attr-defined]
    assert transport.send(version=5, **sent(engine, adapter)).version == transport.version == 5
    return looked_at(module, sequences)


def by_disk(engine: TrainEngine, path: str, sequences: list[Tensor], folder: Path, adapter: str | None = None) -> Found:
    transport = DiskTransport(engine.control, folder / "weights", file_bytes=FILE_BYTES)  # type: ignore[attr-defined]
    transport.send(version=5, **sent(engine, adapter))
    module = replica(path, adapter=adapter)
    receiver: WeightReceiver = DiskReceiver(folder / "weights", module)
    assert receiver.receive(0) == 5
    return looked_at(module, sequences)


@pytest.mark.parametrize(
    "layout",
    [pytest.param(it, id=it.name, marks=pytest.mark.world(it.world)) for it in all_layouts() if it.name in SENT],
)
def test_replica_equals_trainer_after_sync(layout: Layout, tmp_path: Path) -> None:
    cell = Cell(layout, family=layout.family, dtype="float32")
    with start_cell(cell, LEARN) as run:
        engine, everything = run.engine, run.samples()
        before = weights_of(engine)
        engine.train_batch(run.batch(), cell.objective.loss_fn, cell.objective.weight_fn)
        expected = weights_of(engine)
        assert not any(torch.equal(before[name], expected[name]) for name in before if "proj" in name)
        own = run.local_indices
        rows = engine.forward_batch([everything[i] for i in own])
        sequences = [sample["input_ids"] for sample in everything]
        shown = {
            "direct": by_direct(engine, cell.path, sequences, tmp_path),
            "disk": by_disk(engine, cell.path, sequences, tmp_path),
        }
    for way, (weights, logprobs) in shown.items():
        assert same_bits(weights, expected), way
        for actual, want in zip(rows, [logprobs[i] for i in own], strict=True):
            assert (actual - want).abs().max() <= TOLERANCES["float32"] * max(1.0, want.abs().max().item()), way


@pytest.mark.parametrize("backend", layouts(1, 2, also=("fsdp:t2", "megatron:t2")))
def test_adapter_only_sync(backend: str, tmp_path: Path) -> None:
    path, everything = model_dir("qwen3_tied"), global_batch()
    adapter = adapter_dir(path, LORA)
    with started(backend, path=path, lora=LORA, optimizer=LEARN) as engine:
        engine.adapters.load("default", adapter)
        engine.train_batch(local_batch(engine, everything), loss)
        expected = {name: tensor.clone() for name, tensor in engine.adapters.named_tensors()}
        rows = engine.forward_batch(local_batch(engine, everything))
        sequences = [sample["input_ids"] for sample in local_batch(engine, everything)]
        shown = {
            "direct": by_direct(engine, path, sequences, tmp_path, adapter),
            "disk": by_disk(engine, path, sequences, tmp_path, adapter),
        }
    files = {name: tensor.clone() for name, tensor in ModuleSource(replica(path)).named_tensors()}
    for way, (weights, logprobs) in shown.items():
        assert same_bits(weights, files | expected), way
        for actual, want in zip(rows, logprobs, strict=True):
            assert (actual - want).abs().max() <= TOLERANCES["float32"] * max(1.0, want.abs().max().item()), way


@pytest.mark.parametrize("backend", layouts(1, 2))
def test_bfloat16_replica_of_float32_trainer(backend: str, tmp_path: Path) -> None:
    """The values are rounded once, either by the trainer or by the replica."""
    path, everything = model_dir("qwen3"), global_batch()
    with started(backend, path=path, dtype="bfloat16", optimizer=LEARN) as engine:
        engine.train_batch(local_batch(engine, everything), loss)
        expected = {name: tensor.bfloat16() for name, tensor in weights_of(engine).items()}
        rows = engine.forward_batch(local_batch(engine, everything))
        modules = [replica(path, torch.bfloat16) for _ in range(2)]
        control: ControlPlane = engine.control  # type: ignore[attr-defined]
        DirectTransport(control, modules[0]).send(engine, 1)
        meta = DiskTransport(control, tmp_path / "w", cast=torch.bfloat16).send(engine, 1)
        assert meta.nbytes == 2 * sum(tensor.numel() for tensor in expected.values())
        DiskReceiver(tmp_path / "w", modules[1]).receive(0)
        sequences = [sample["input_ids"] for sample in local_batch(engine, everything)]
    for module in modules:
        weights, logprobs = looked_at(module, sequences)
        assert same_bits(weights, expected)
        for actual, want in zip(rows, logprobs, strict=True):
            assert (actual - want).abs().max() <= TOLERANCES["bfloat16"] * max(1.0, want.abs().max().item())


@pytest.mark.parametrize("backend", layouts(2))
@pytest.mark.parametrize("stage", ["draft opened", "in file 2", "written"])
def test_sender_fault_raises_on_all_ranks_and_engine_continues(backend: str, stage: str, tmp_path: Path) -> None:
    def fail(reached: str) -> None:
        if reached == stage:
            raise OSError("no space left on the device")

    with started(backend) as engine:
        transport = DiskTransport(engine.control, tmp_path / "w", file_bytes=FILE_BYTES)  # type: ignore[attr-defined]
        with (
            at_stages(fail),
            pytest.raises(RuntimeError, match=r"rank 0: OSError: no space left.*version 1 was not sent"),
        ):
            transport.send(engine, 1)
        assert world().rank > 0 or os.listdir(tmp_path / "w") == []
        transport.send(engine, 2)
        module = replica(model_dir("qwen3"))
        assert DiskReceiver(tmp_path / "w", module).receive(0) == 2
        engine.train_batch(local_batch(engine, global_batch()), loss)


@pytest.mark.parametrize("backend", layouts(2))
def test_replicas_on_some_ranks_only(backend: str) -> None:
    path = model_dir("qwen3")
    with started(backend, path=path) as engine:
        engine.train_batch(local_batch(engine, global_batch()), loss)
        module = replica(path) if world().rank == 1 else None
        transport = DirectTransport(engine.control, module)  # type: ignore[attr-defined]
        meta = transport.send(engine, 3)
        assert (meta.version, meta.n_tensors) == (3, len(weights_of(engine)))
        assert transport.version == (3 if world().rank == 1 else None)
        expected = weights_of(engine)
        assert module is None or same_bits(looked_at(module, [])[0], expected)
        transport = DirectTransport(engine.control, module)  # type: ignore[attr-defined]
        assert transport.send(engine, 4, select=lambda name: "embed" in name).n_tensors == 1
