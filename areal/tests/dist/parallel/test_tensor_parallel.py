"""Tensor parallelism on the FSDP engine: properties that the grid does not test."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from areal.api import FinetuneSpec, SaveLoadMeta
from areal.utils.dtensor import full_tensor, local_shard
from areal.engine.fsdp.tensor_parallel import PLANS
from areal.engine.registry import create_engine
from areal.tests.grid.models import model_dir
from areal.tests.harness.tiny import config, loss, local_batch, global_batch, same_bits, started, weights_of

FOUR = [pytest.mark.world(4), pytest.mark.thorough]
FAMILIES = ["llama", "qwen2", "qwen3", "qwen3_tied"]


@pytest.mark.parametrize(
    "backend",
    [pytest.param("fsdp:t2", marks=pytest.mark.world(2)), pytest.param("fsdp:d2t2", marks=FOUR)],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_tensor_parallel_loads_streams_and_saves_hf_files(backend: str, family: str, tmp_path: Path) -> None:
    path = model_dir(family)
    on_disk = {key: x for file in sorted(Path(path).glob("model*.safetensors")) for key, x in load_file(file).items()}
    with started(backend, path=path) as engine:
        assert same_bits(weights_of(engine), on_disk)
        engine.save(SaveLoadMeta(tmp_path / "saved"))
        assert same_bits(load_file(tmp_path / "saved" / "model.safetensors"), on_disk)
        model: Any = engine._parts.model[0]
        assert all(isinstance(p, DTensor) and "tp" in str(p.device_mesh.mesh_dim_names) for p in model.parameters())
        assert (model.hf.lm_head.weight is model.hf.model.embed_tokens.weight) == (family == "qwen3_tied")
        local_elements = sum(local_shard(p)[0].numel() for p in model.parameters() if p.dim() == 2)
        assert local_elements * dist.get_world_size() == sum(p.numel() for p in model.parameters() if p.dim() == 2)


@pytest.mark.world(2)
def test_random_weights_do_not_depend_on_layout() -> None:
    with started("fsdp:t2", init_from_scratch=True, seed=3) as engine:
        result = weights_of(engine)
    with started("fsdp:d2", init_from_scratch=True, seed=3) as engine:
        assert same_bits(weights_of(engine), result)


@pytest.mark.parametrize(
    "backend",
    [pytest.param("fsdp:t2", marks=pytest.mark.world(2)), pytest.param("fsdp:d2t2", marks=FOUR)],
)
def test_replicated_weights_stay_bitwise_equal(backend: str) -> None:
    with started(backend, path=model_dir("qwen3"), grad_sync="micro_batch") as engine:
        before = weights_of(engine)
        for step in range(20):
            engine.train_batch(local_batch(engine, global_batch(step)), loss)
        model, group = engine._parts.model, engine.mesh["tp"].get_group()
        norms = {name: p.to_local() for name, p in model.named_parameters() if "norm" in name}
        assert len(norms) == 2 * 4 + 1  # two norms of tokens and two of heads in each layer, and the last norm
        copies: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(copies, {name: norm.tolist() for name, norm in norms.items()}, group=group)
        assert all(copy == copies[0] for copy in copies)
        after = weights_of(engine)
        assert not any(torch.equal(after[name], weight) for name, weight in before.items())


@pytest.mark.parametrize(
    ("write", "read"),
    [
        pytest.param("fsdp:t2", "fsdp:d2", marks=pytest.mark.world(2)),
        pytest.param("fsdp:c2", "fsdp:t2", marks=pytest.mark.world(2)),
        pytest.param("fsdp:d4", "fsdp:d2t2", marks=FOUR),
        pytest.param("fsdp:d2t2", "fsdp:c2t2", marks=FOUR),
    ],
)
def test_checkpoint_resumes_in_another_layout(write: str, read: str, tmp_path: Path) -> None:
    meta = SaveLoadMeta(tmp_path / "run", weight_format="dcp")
    with started(write, value_head=True) as engine:
        engine.train_batch(local_batch(engine, global_batch(1)), loss)
        engine.save(meta)
        saved, moments = weights_of(engine), moments_of(engine)
        assert len(moments) > 20
        engine.train_batch(local_batch(engine, global_batch(2)), loss)
        went_on = weights_of(engine)
    with started(read, value_head=True) as engine:
        engine.load(meta)
        assert same_bits(weights_of(engine), saved)
        assert same_bits(moments_of(engine), moments)
        engine.train_batch(local_batch(engine, global_batch(2)), loss)
        for name, weight in weights_of(engine).items():
            change = (went_on[name] - saved[name]).norm()
            assert (weight - went_on[name]).norm() <= 2e-3 * change + 1e-6, name


def moments_of(engine: Any) -> dict[str, torch.Tensor]:
    """Return the full moments by parameter."""
    state = engine._parts.optimizer.inner.state
    return {
        f"{name}.{key}": full_tensor(state[parameter][key])
        for name, parameter in engine._parts.model.named_parameters()
        if "exp_avg" in state.get(parameter, {})
        for key in ("exp_avg", "exp_avg_sq")
    }


@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("gemma3_text", {}, r"'gemma3_text' has no tensor-parallel plan.*llama, qwen2, qwen3"),
        ("smollm", {}, r"num_attention_heads = 9 does not divide over 2"),
        ("qwen3", {"num_key_value_heads": 1}, r"num_key_value_heads = 1 does not divide over 2"),
        ("llama", {"vocab_size": 113}, r"vocab_size = 113 does not divide over 2"),
    ],
)
def test_unsupported_tensor_parallel_models_raise(family: str, changes: dict[str, Any], message: str) -> None:
    with create_engine(config("fsdp:t2", path=model_dir(family, **changes))) as engine, pytest.raises(ValueError, match=message):
        engine.initialize(FinetuneSpec(total_train_steps=1))


@pytest.mark.world(2)
def test_tensor_parallel_with_unpacked_model_raises() -> None:
    settings = config("fsdp:t2", path=model_dir("llama"), fsdp={"attention": "rows"})
    with create_engine(settings) as engine, pytest.raises(ValueError, match="needs packed attention"):
        engine.initialize(FinetuneSpec(total_train_steps=1))


@pytest.mark.world(2)
def test_incomplete_tensor_parallel_plan_raises() -> None:
    plan = {pattern: kind for pattern, kind in PLANS["qwen3"].items() if "[qk]_norm" not in pattern}
    settings = config("fsdp:t2", path=model_dir("qwen3"))
    with (
        mock.patch("areal.engine.fsdp.tensor_parallel.PLANS", {"qwen3": plan}),
        create_engine(settings) as engine,
        pytest.raises(ValueError, match=r"leaves out .*q_norm.weight"),
    ):
        engine.initialize(FinetuneSpec(total_train_steps=1))


@pytest.mark.world(2)
def test_embedding_of_padding_token_is_not_trained() -> None:
    """Same as in torch's embedding; the row is on the second rank here."""
    path = model_dir("qwen3", pad_token_id=90)
    batch = [{"input_ids": torch.tensor([3, 90, 4, 90, 60])}]
    gradients = []
    for backend in ("fsdp:d2", "fsdp:t2"):
        with started(backend, path=path) as engine:
            engine.forward_backward(batch, lambda out, b: -out.logprobs.sum())
            gradients.append({name: x.clone() for name, x in engine.named_gradients()})
    rows = [result["model.embed_tokens.weight"] for result in gradients]
    assert not rows[1][90].any()
    assert rows[1][4].any()
    assert torch.allclose(rows[0], rows[1], rtol=1e-4, atol=1e-7)
