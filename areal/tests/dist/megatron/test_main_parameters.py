"""Float32 main parameters of bf16 runs: they are the weights that are saved, loaded and streamed from shards."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from areal.api import SaveLoadMeta, TrainEngine
from areal.engine.checkpoint.dcp import read_metadata
from areal.tests.dist.checkpoint.checkpoints import DCP, step
from areal.tests.harness.tiny import same_bits, started, weights_of

pytest.importorskip("megatron.core")

from areal.engine.megatron.optimizer.main_parameters import present_optimizers

KINDS = [
    pytest.param({}, id="sharded", marks=pytest.mark.world(1)),
    pytest.param({"megatron": {"distributed_optimizer": False}}, id="copied", marks=pytest.mark.world(1)),
]


def shards_of(engine: TrainEngine) -> dict[str, Tensor]:
    shards = {part.name: part.tensor.clone() for part in engine.local_tensors()}
    assert {shard.dtype for shard in shards.values()} == {torch.float32}
    return shards


@pytest.mark.parametrize("options", KINDS)
def test_offloaded_main_parameters_return_alone_with_the_weights(options: dict[str, Any], tmp_path: Path) -> None:
    with started("megatron:d1", dtype="bfloat16", **options) as engine:
        step(engine, 1)
        shards, whole = shards_of(engine), engine.memory()[0].optimizer.on_device
        engine.offload()
        assert engine.memory()[0].optimizer.offloaded == whole
        assert same_bits(shards_of(engine), shards)
        # AdamW has two moments of their size.
        assert engine.memory()[0].optimizer.on_device == whole // 3
        for meta in (SaveLoadMeta(tmp_path / "hf"), SaveLoadMeta(tmp_path / "light", DCP, with_optim=False)):
            engine.offload()
            engine.save(meta)
            step(engine, 2)
            engine.offload()
            engine.load(meta)
            assert same_bits(shards_of(engine), shards)


@pytest.mark.parametrize("reduce", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", KINDS)
def test_main_parameters_keep_no_gradients_after_a_step(options: dict[str, Any], reduce: str) -> None:
    """Where the buffers are narrower, Megatron copies them to float32."""
    with started("megatron:d1", dtype="bfloat16", grad_reduce_dtype=reduce, **options) as engine:
        step(engine, 1)
        components: Any = engine._components
        (optimizer,) = present_optimizers(components.checkpointer._chained)
        assert not [p for p in optimizer.get_parameters() if p.grad is not None]


@pytest.mark.parametrize("options", KINDS)
def test_checkpoint_without_optimizer_has_main_parameters_and_no_moments(
    options: dict[str, Any], tmp_path: Path
) -> None:
    light = SaveLoadMeta(tmp_path / "light", DCP, with_optim=False)
    with started("megatron:d1", dtype="bfloat16", **options) as engine:
        step(engine, 1)
        engine.save(light)
        shards, weights = shards_of(engine), weights_of(engine)
    assert not any(torch.equal(shards[name], weights[name].float()) for name in shards)
    names = read_metadata(tmp_path / "light").state_dict_metadata
    assert not [name for name in names if "exp_avg" in name]
    with started("megatron:d1", dtype="bfloat16", **options) as engine:
        engine.load(light)
        assert same_bits(shards_of(engine), shards)
        assert same_bits(weights_of(engine), weights)
