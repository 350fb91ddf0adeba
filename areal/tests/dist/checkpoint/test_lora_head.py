"""Adapters on the output head: values and gradients, tied embeddings, files of peft in both directions, and refusals."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from areal.api import LoRAConfig, OptimizerConfig, SaveLoadMeta
from areal.engine.model.tiny_config import shrink
from areal.tests.dist.checkpoint.lora_engines import adapted, logprobs, mine_of, model_of, of, scores, train
from areal.tests.grid.cell_engine import start_cell
from areal.tests.grid.compare import assert_number, assert_tensors
from areal.tests.grid.layouts import LORA, Cell, Layout
from areal.tests.grid.models import adapter_dir, model_dir
from areal.tests.harness.tiny import chosen, global_batch, layout, local_batch, loss, same_bits, started, weights_of

HEAD = "base_model.model.lm_head.lora_{}.weight"
WITH_HEAD = LoRAConfig(rank=3, target_modules=("q_proj", "down_proj", "lm_head"))
UNEVEN = {"vocab_size": 115}
"""Two ranks do not have equally many rows of this vocabulary."""


@pytest.mark.parametrize(
    "backend",
    chosen("fsdp:t2", "megatron:p2", "fsdp:d1", "megatron:d1", "megatron:t2", "fsdp:p2", "fsdp:d2t2", "jax:t2"),
)
def test_three_steps_with_tied_embeddings_track_the_reference(backend: str) -> None:
    """The grid compares gradients of one step. Here the factors are updated, and the tied weight is not."""
    optimizer = OptimizerConfig(lr=0.03, eps=1e-4, weight_decay=0.1, gradient_clipping=0.3)
    cell = Cell(Layout(backend, changes=UNEVEN), family="qwen3_tied", options="lora", cut="tokens24")
    call = (cell.objective.loss_fn, cell.objective.weight_fn)
    with start_cell(cell, optimizer) as run:
        reference, before = run.reference(), [x.clone() for x in model_of(run.engine)]
        reference.make_optimizer(optimizer, total_steps=100)
        for seed in range(3):
            reference.step(run.samples(seed), *call)
            norm, _ = reference.optimizer_step()
            assert_number(run.engine.train_batch(run.batch(seed), *call).grad_norm, norm, cell.tolerance)
        expected = {name: x.detach() for name, x in reference.named_parameters()}
        assert {HEAD.format("A"), HEAD.format("B")} <= expected.keys()
        assert_tensors(run.engine.adapters.named_tensors(), expected, 10 * cell.tolerance)
        assert all(torch.equal(x, b) for x, b in zip(model_of(run.engine), before, strict=True))


@pytest.mark.parametrize(
    "backend",
    chosen(
        *("fsdp:d1", "megatron:t2"),
        "fsdp:t2",
        "fsdp:d2",
        "fsdp:c2",
        "fsdp:p2",
        "megatron:p2",
        "megatron:c2",
        "jax:d1",
    ),
)
@pytest.mark.parametrize("family", ["llama", "qwen3_tied"])
def test_head_adapter_round_trips_with_peft(backend: str, family: str, tmp_path: Path) -> None:
    path = model_dir(family, **UNEVEN)
    theirs = adapter_dir(path, LORA, head=True)
    copied = load_file(Path(theirs) / "adapter_model.safetensors")
    # peft also writes the weight of the head itself.
    copied.pop("base_model.model.lm_head.base_layer.weight")
    with adapted(backend, path=path) as engine:
        engine.adapters.load("theirs", theirs)
        engine.adapters.select("theirs")
        assert same_bits(of(engine), copied)
        loaded = logprobs(engine)
        train(engine, 1, 2)
        engine.adapters.save("theirs", tmp_path / "ours")
        trained, actual = of(engine), logprobs(engine)
        if family == "qwen3_tied":
            # Merged, the embedding would change, too.
            with pytest.raises(ValueError, match="stores lm_head under another name or merged with other layers"):
                engine.save(SaveLoadMeta(tmp_path / "merged"))
            with pytest.raises(ValueError, match="stores lm_head under another name"):
                weights_of(engine)
            assert same_bits(of(engine), trained)
        else:
            engine.save(SaveLoadMeta(tmp_path / "merged"))
            streamed = weights_of(engine)
    assert not same_bits(trained, copied)
    assert same_bits(load_file(tmp_path / "ours" / "adapter_model.safetensors"), trained)
    batch = mine_of(backend)
    for folder, expected in ((theirs, loaded), (tmp_path / "ours", actual)):
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(path), str(folder)).eval()
        for sample, row in zip(batch, expected, strict=True):
            assert (scores(model, sample) - row).abs().max() < 2e-5
    if family == "llama":
        merged: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
        for sample, row in zip(batch, actual, strict=True):
            assert (scores(merged, sample) - row).abs().max() < 2e-5
        plain = model.merge_and_unload().state_dict()
        assert_tensors(iter(streamed.items()), {name: plain[name] for name in streamed}, 1e-6)


@pytest.mark.parametrize("backend", chosen("fsdp:t2", "megatron:p2", "fsdp:d1", "megatron:t2", "fsdp:p2", "jax:d1"))
def test_head_adapter_trains_and_leaves_others_alone(backend: str) -> None:
    path = model_dir("qwen3_tied", **UNEVEN)
    with started(backend, path=path) as engine:
        plain = logprobs(engine)
    with started(backend, path=path, lora=WITH_HEAD) as engine:
        engine.adapters.add("other", LORA, seed=7)
        # ``B`` is zero: a new adapter does not change a bit, except in JAX, where adapters of other layers are another program.
        same = torch.allclose if backend.startswith("jax") else torch.equal
        new = logprobs(engine)
        assert all(same(a, b) for a, b in zip(new, plain, strict=True))
        engine.adapters.select("other")
        other = logprobs(engine)
        assert all(same(a, b) for a, b in zip(other, plain, strict=True))
        engine.adapters.select("default")
        train(engine, 1, 2)
        trained = of(engine)
        assert trained[HEAD.format("B")].any()
        # Replicated factors are equal on all ranks.
        mine = {f.name: f.parameter.tolist() for f in engine.adapters["default"].factors if f.split_dim is None}
        copies: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(copies, mine)
        assert all(copy[name] == mine[name] for copy in copies for name in copy.keys() & mine.keys())
        engine.adapters.select("other")
        assert all(torch.equal(a, b) for a, b in zip(logprobs(engine), other, strict=True))
        with engine.reference():
            assert all(torch.equal(a, b) for a, b in zip(logprobs(engine), other, strict=True))
        engine.adapters.select("default")
        with engine.reference():
            assert all(torch.equal(a, b) for a, b in zip(logprobs(engine), new, strict=True))
        # Logits have the update, too.
        batch = local_batch(engine, global_batch())
        both = engine.forward_batch(batch, outputs=("logprobs", "logits"))
        for sample, row, logits in zip(batch, both["logprobs"], both["logits"], strict=True):
            picked = logits[:-1].log_softmax(-1).gather(-1, sample["input_ids"][1:, None])[:, 0]
            torch.testing.assert_close(picked, row[:-1], rtol=1e-5, atol=1e-5)
        assert same_bits(of(engine), trained)


@pytest.mark.parametrize(
    ("write", "read"),
    [
        pytest.param("fsdp:t2", "megatron:p2", marks=pytest.mark.world(2)),
        pytest.param("megatron:t2", "fsdp:t2", marks=pytest.mark.world(2)),
    ],
)
def test_head_adapter_resumes_in_another_layout(write: str, read: str, tmp_path: Path) -> None:
    meta = SaveLoadMeta(tmp_path / "run", weight_format="dcp")
    changes: dict[str, Any] = {"path": model_dir("qwen3_tied", **UNEVEN), "lora": WITH_HEAD}
    with started(write, **changes) as engine:
        train(engine, 1, 2)
        engine.save(meta)
        saved = of(engine)
        train(engine, 3)
        went_on = of(engine)
    with started(read, **changes) as engine:
        engine.load(meta)
        assert same_bits(of(engine), saved)
        train(engine, 3)
        for name, weight in of(engine).items():
            change = (went_on[name] - saved[name]).norm()
            assert (weight - went_on[name]).norm() <= 2e-3 * change + 1e-6, name


@pytest.mark.world(1)
@pytest.mark.parametrize("backend", ["fsdp:d1", "megatron:d1", layout("jax:d1")])
def test_adapter_on_the_head_alone_trains(backend: str) -> None:
    with started(backend, lora=LoRAConfig(rank=2, target_modules=("lm_head",))) as engine:
        before = engine.eval_batch(global_batch(), loss).loss
        for _ in range(4):
            engine.train_batch(global_batch(), loss)
        assert set(of(engine)) == {HEAD.format("A"), HEAD.format("B")}
        assert engine.eval_batch(global_batch(), loss).loss < before


@pytest.mark.world(2)
@pytest.mark.parametrize("backend", ["fsdp:p2", "megatron:p2"])
def test_stage_without_adapters_is_refused(backend: str) -> None:
    with (
        pytest.raises(ValueError, match="no layer of this pipeline stage would have an adapter"),
        started(backend, lora=LoRAConfig(target_modules=("lm_head",))),
    ):
        pass


@pytest.mark.world(1)
def test_head_of_other_weights_is_refused(tmp_path: Path) -> None:
    """peft's file has a copy of the head's own weight. Loading it would be lost silently if it was not the model's."""
    path = model_dir("qwen3_tied")
    theirs = adapter_dir(path, LORA, head=True)
    weights = load_file(Path(theirs) / "adapter_model.safetensors")
    name = "base_model.model.lm_head.base_layer.weight"
    shutil.copytree(theirs, tmp_path / "other")
    save_file({**weights, name: weights[name] + 0.01}, tmp_path / "other" / "adapter_model.safetensors")
    # In the dtype in which peft had the model.
    shutil.copytree(theirs, tmp_path / "narrow")
    save_file({**weights, name: weights[name].bfloat16()}, tmp_path / "narrow" / "adapter_model.safetensors")
    with adapted("fsdp:d1", path=path) as engine:
        with pytest.raises(ValueError, match=r"lm_head.base_layer.weight', a weight of the model itself"):
            engine.adapters.load("other", tmp_path / "other")
        assert engine.adapters.names == ("default",)
        engine.adapters.load("narrow", tmp_path / "narrow")
    with (
        adapted("fsdp:d1", path=path, init_from_scratch=True) as engine,
        pytest.raises(ValueError, match="other values than a model with random weights"),
    ):
        engine.adapters.load("theirs", theirs)


@pytest.mark.world(1)
def test_head_that_is_more_than_a_product_is_refused(tmp_path: Path) -> None:
    """Its logits are computed by the model's own code."""
    shrink(AutoConfig.for_model("electra", is_decoder=True)).save_pretrained(tmp_path)
    lora = LoRAConfig(rank=2, target_modules=("query", "generator_lm_head"))
    with (
        pytest.raises(
            ValueError, match=r"layer generator_lm_head cannot have an adapter: .* choose lora.target_modules"
        ),
        started("fsdp:d1", path=str(tmp_path), init_from_scratch=True, lora=lora),
    ):
        pass
