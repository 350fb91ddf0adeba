"""Weights from and to Hugging Face files: sliced reads, full tensors out, and the names that transformers writes."""

import hashlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import Transpose, WeightConverter

from areal.api import FinetuneSpec
from areal.engine.checkpoint import tensor_layout as naming
from areal.engine.checkpoint.safetensors import TensorFiles
from areal.engine.checkpoint.tensor_layout import disk_layout, stored_tensors
from areal.engine.model.probe import probe
from areal.engine.model.random_init import draw
from areal.engine.model.tiny_config import shrink
from areal.engine.registry import create_engine
from areal.tests.dist.checkpoint.weight_files import DAMAGES, copied, edit, on_disk
from areal.tests.grid.models import FAMILIES, model_dir
from areal.tests.harness.tiny import (
    config,
    global_batch,
    gradients_of,
    local_batch,
    loss,
    same_bits,
    started,
    weights_of,
)
from areal.tests.harness.world import cached, world


def layout(world_size: int) -> str:
    return {1: "fsdp:d1", 2: "fsdp:d2", 4: "fsdp:r2d2"}[world_size]


@pytest.mark.world(1, 2, 4)
@pytest.mark.parametrize("family", [*FAMILIES])
def test_named_tensors_equal_hf_files(family: str, world_size: int) -> None:
    path = model_dir(family)
    with started(f"fsdp:d{world_size}", path=path) as engine:
        assert same_bits(weights_of(engine), on_disk(path))
        names = [name for name, _ in engine.named_tensors()]
        assert len(names) == len(set(names))


@pytest.mark.world(2, 4)
@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_moe", "qwen3_tied"])
def test_meta_device_init_keeps_buffers_and_ties(family: str, world_size: int) -> None:
    path = model_dir(family)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with started(layout(world_size), path=path) as engine:
        hf = engine._components.model[0].hf
        expected = dict(plain.named_buffers())
        assert expected
        assert all(torch.equal(buffer, expected[name]) for name, buffer in hf.named_buffers())
        tied = hf.get_output_embeddings().weight is hf.get_input_embeddings().weight
        assert tied == plain.config.tie_word_embeddings


@pytest.mark.world(4)
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_each_rank_reads_only_its_slices(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read, original = [], TensorFiles.read

    def counting(files: TensorFiles, key: str, index: tuple[slice, ...]) -> Tensor:
        tensor = original(files, key, index)
        read.append(tensor.numel())
        return tensor

    monkeypatch.setattr(TensorFiles, "read", counting)
    path = model_dir(family)
    with started("fsdp:d4", path=path):
        counts: list[int] = [0] * 4
        dist.all_gather_object(counts, sum(read))
    total = sum(tensor.numel() for tensor in on_disk(path).values())
    assert sum(counts) == total
    assert max(counts) < 0.3 * total


@pytest.mark.world(1, 2, 4)
def test_random_weights_are_equal_on_every_layout(world_size: int) -> None:
    path = model_dir("qwen3_moe")
    with started(layout(world_size), path=path, init_from_scratch=True, value_head=True, seed=5) as engine:
        weights = weights_of(engine)
        digest = hashlib.sha256(
            b"".join(t.contiguous().numpy().tobytes() for _, t in sorted(weights.items()))
        ).hexdigest()
        assert cached("random-weights", "qwen3_moe", lambda: digest) == digest
        assert not same_bits({k: v for k, v in weights.items() if "value_head" not in k}, on_disk(path))
    with started(layout(world_size), path=path, init_from_scratch=True, value_head=True, seed=6) as engine:
        assert not torch.equal(weights_of(engine)["lm_head.weight"], weights["lm_head.weight"])


def test_random_weights_and_probes_do_not_seed_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine has seeded their generators for each data-parallel rank, and nothing would restore them."""
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    config = shrink(AutoConfig.for_model("qwen3"))
    model = AutoModelForCausalLM.from_config(config)
    before = torch.get_rng_state()
    draw(model, 5, lambda block: None)
    assert probe(config, None).runs is None
    assert seeds == []
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.world(2, 4)
def test_engine_works_after_another_of_same_layout_is_destroyed(world_size: int) -> None:
    """The meshes are equal, and torch caches sharded-tensor data by mesh: process groups must not be mixed up."""
    backend = {2: "fsdp:d2", 4: "fsdp:r2d2"}[world_size]
    with started(backend) as outer:
        before = weights_of(outer)
        for _ in range(2):
            with started(backend, optimizer=None) as inner:
                assert same_bits(weights_of(inner), before)
        assert same_bits(weights_of(outer), before)
        outer.train_batch(local_batch(outer, global_batch()), loss)
        assert not same_bits(weights_of(outer), before)


@pytest.mark.world(1, 2)
def test_named_gradients_have_weight_names_and_zeros_if_missing(world_size: int) -> None:
    path = model_dir("qwen3_moe")
    with started(f"fsdp:d{world_size}", path=path, value_head=True) as engine:
        engine.forward_backward(local_batch(engine, global_batch()), loss)
        gradients = gradients_of(engine)
        engine.zero_grad()
        shapes = {name: tensor.shape for name, tensor in weights_of(engine).items()}
    assert {name: tensor.shape for name, tensor in gradients.items()} == shapes
    assert not gradients["value_head.weight"].any()
    assert gradients["lm_head.weight"].any()
    assert gradients["model.layers.0.mlp.experts.0.gate_proj.weight"].any()


@pytest.mark.world(1, 2)
def test_named_tensors_are_copies(world_size: int) -> None:
    with started(f"fsdp:d{world_size}") as engine:
        kept = dict(engine.named_tensors())
        before = {name: tensor.clone() for name, tensor in kept.items()}
        engine.train_batch(local_batch(engine, global_batch()), loss)
        assert same_bits(kept, before)
        assert not same_bits(weights_of(engine), before)


@pytest.mark.world(1, 2)
def test_value_head_is_read_from_its_file(world_size: int, tmp_path: Path) -> None:
    folder = copied("qwen3", tmp_path)
    head = torch.arange(32.0).view(1, 32)
    if world().rank == 0:
        save_file({"value_head.weight": head}, folder / "value_head.safetensors")
    dist.barrier()
    with started(f"fsdp:d{world_size}", path=str(folder), value_head=True) as engine:
        assert torch.equal(weights_of(engine)["value_head.weight"], head)
    with started(f"fsdp:d{world_size}", path=str(folder)) as engine:
        assert "value_head.weight" not in weights_of(engine)


def test_weight_conversion_without_slices_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    transposed = WeightConverter("q_proj.weight", "q_proj.weight", [Transpose(0, 1)])
    monkeypatch.setattr(naming, "get_model_conversion_mapping", lambda hf, add_legacy: [transposed])
    model = AutoModelForCausalLM.from_pretrained(model_dir("qwen3"))
    with pytest.raises(ValueError, match=r"'qwen3'.*layers\.0\.self_attn\.q_proj\.weight"):
        disk_layout(model)


def test_slices_cover_every_tensor_once() -> None:
    model = AutoModelForCausalLM.from_pretrained(model_dir("qwen3_moe"))
    tensors = dict(stored_tensors(model))
    for name, pieces in disk_layout(model).items():
        seen = torch.zeros(tensors[name].shape, dtype=torch.int64)
        for piece in pieces:
            seen[piece.box] += 1
        assert (seen == 1).all(), name


# ---- files that do not match the model


@pytest.mark.world(2)
@pytest.mark.parametrize("damage", [*DAMAGES])
def test_mismatched_files_raise_on_every_rank(damage: str, tmp_path: Path) -> None:
    apply, message = DAMAGES[damage]
    folder = copied("qwen3", tmp_path)
    if world().rank == 0:
        apply(folder)
    dist.barrier()
    engine = create_engine(config("fsdp:d2", path=str(folder)))
    with pytest.raises(ValueError, match=message):
        engine.initialize(FinetuneSpec(total_train_steps=1))
    with started("fsdp:d2"):  # the world still works
        dist.barrier()


@pytest.mark.world(2)
def test_known_extra_keys_are_ignored(tmp_path: Path) -> None:
    folder = copied("qwen3_tied", tmp_path)
    if world().rank == 0:
        edit(
            lambda t: t.update(
                {"lm_head.weight": t.pop("model.embed_tokens.weight"), "model.rotary_emb.inv_freq": torch.ones(4)}
            )
        )(folder)
    dist.barrier()
    with started("fsdp:d2", path=str(folder)) as engine:
        weights = weights_of(engine)
    assert torch.equal(
        weights["model.embed_tokens.weight"], on_disk(model_dir("qwen3_tied"))["model.embed_tokens.weight"]
    )
