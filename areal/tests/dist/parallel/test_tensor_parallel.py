"""Tensor parallelism on the FSDP engine: properties that the grid does not test."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from areal.api import FinetuneSpec, ParallelDims, SaveLoadMeta, TopK
from areal.engine.fsdp.tensor_plans import PLANS, check_plan
from areal.engine.registry import create_engine
from areal.tests.grid.cell_engine import start_cell
from areal.tests.grid.compare import assert_number, assert_step, assert_tensors
from areal.tests.grid.layouts import Cell, Layout
from areal.tests.grid.models import FAMILIES, model_dir, value_head
from areal.tests.grid.reference import Reference
from areal.tests.harness.tiny import config, global_batch, local_batch, loss, same_bits, started, weights_of
from areal.utils.dtensor import full_tensor, local_shard

FOUR = [pytest.mark.world(4)]
UNEVEN: dict[str, Any] = {"vocab_size": 115, "num_key_value_heads": 1}
"""Numbers that two ranks do not divide."""


@pytest.mark.parametrize(
    "backend",
    [pytest.param("fsdp:t2", marks=pytest.mark.world(2)), pytest.param("fsdp:d2t2", marks=FOUR)],
)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_tied", "gemma3_text"])
def test_tensor_parallel_loads_streams_and_saves_hf_files(backend: str, family: str, tmp_path: Path) -> None:
    path = model_dir(family)
    on_disk = {key: x for file in sorted(Path(path).glob("model*.safetensors")) for key, x in load_file(file).items()}
    with started(backend, path=path) as engine:
        assert same_bits(weights_of(engine), on_disk)
        engine.save(SaveLoadMeta(tmp_path / "saved"))
        assert same_bits(load_file(tmp_path / "saved" / "model.safetensors"), on_disk)
        model: Any = engine._components.model[0]
        assert all(isinstance(p, DTensor) and "tp" in str(p.device_mesh.mesh_dim_names) for p in model.parameters())
        assert (model.hf.lm_head.weight is model.hf.model.embed_tokens.weight) == (
            family in ("qwen3_tied", "gemma3_text")
        )
        local_elements = sum(local_shard(p)[0].numel() for p in model.parameters() if p.dim() == 2)
        assert local_elements * dist.get_world_size() == sum(p.numel() for p in model.parameters() if p.dim() == 2)


@pytest.mark.world(2)
@pytest.mark.parametrize("changes", [{}, UNEVEN], ids=["even", "uneven"])
def test_random_weights_do_not_depend_on_layout(changes: dict[str, Any]) -> None:
    options = {"init_from_scratch": True, "seed": 3, "path": model_dir("qwen3", **changes)}
    with started("fsdp:t2", **options) as engine:
        result = weights_of(engine)
    with started("fsdp:d2", **options) as engine:
        assert same_bits(weights_of(engine), result)


@pytest.mark.parametrize(
    "backend",
    [pytest.param("fsdp:t2", marks=pytest.mark.world(2)), pytest.param("fsdp:d2t2", marks=FOUR)],
)
@pytest.mark.parametrize("family", ["llama", "qwen3_tied"])
def test_uneven_vocabulary_loads_streams_and_saves(backend: str, family: str, tmp_path: Path) -> None:
    """Also offloads: all of this works on slices whose number of rows differs by rank."""
    path = model_dir(family, **UNEVEN)
    on_disk = {key: x for file in sorted(Path(path).glob("model*.safetensors")) for key, x in load_file(file).items()}
    with started(backend, path=path) as engine:
        assert same_bits(weights_of(engine), on_disk)
        engine.save(SaveLoadMeta(tmp_path / "saved"))
        engine.offload()
        engine.load(SaveLoadMeta(tmp_path / "saved"))
        assert same_bits(weights_of(engine), on_disk)
        assert same_bits(load_file(tmp_path / "saved" / "model.safetensors"), on_disk)
        model: Any = engine._components.model[0]
        embedding = model.hf.model.embed_tokens.weight
        assert (model.hf.lm_head.weight is embedding) == (family == "qwen3_tied")
        # Columns are sharded, because DTensor cannot describe a second, uneven division of the rows.
        assert [str(placement) for placement in embedding.placements] == ["S(1)", "S(0)"]
        local, (rows, _) = local_shard(embedding)
        assert len(local) == rows.stop - rows.start == (58 if engine.mesh["tp"].get_local_rank() == 0 else 57)
        assert local_shard(model.hf.model.layers[0].self_attn.k_proj.weight)[0].shape[0] * engine.dims.dp_shard == 8


@pytest.mark.world(2)
def test_uneven_vocabulary_computes_every_output() -> None:
    """Every output equals transformers', also a top-k of more tokens than a rank has."""
    path, k = model_dir("qwen3", value_head=True, **UNEVEN), UNEVEN["vocab_size"] - 1
    names = ("logprobs", "entropy", "values", "logits", TopK(k))
    reference = Reference(path, value_head=value_head(path))
    with started("fsdp:t2", path=path, value_head=True) as engine:
        batch = local_batch(engine, global_batch())
        actual = engine.forward_batch(batch, outputs=names)
        for i, sample in enumerate(batch):
            with torch.no_grad():
                expected = reference.outputs(sample)
            for name in ("logprobs", "entropy", "values", "logits"):
                torch.testing.assert_close(actual[name][i].double(), getattr(expected, name), rtol=1e-4, atol=1e-5)
            logprobs = expected.logits.log_softmax(-1)
            best = actual["topk"].logprobs[i].double()
            torch.testing.assert_close(best, logprobs.topk(k).values, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(logprobs.gather(-1, actual["topk"].ids[i]), best, rtol=1e-4, atol=1e-5)
        with pytest.raises(ValueError, match=rf"TopK\(k={k + 2}\), but the vocabulary has {k + 1} tokens"):
            engine.forward_batch(batch, outputs=(TopK(k + 2),))


@pytest.mark.world(4)
def test_fewer_key_heads_than_ranks() -> None:
    """Four ranks with two key heads: the gradient of a key head is a sum over two ranks."""
    layout = Layout("fsdp:t4", changes={"vocab_size": 113, "num_key_value_heads": 2})
    cell = Cell(layout, "qwen3", "nll", "starved", "tokens24")
    call = (cell.objective.loss_fn, cell.objective.weight_fn)
    with start_cell(cell) as run:
        expected, _ = run.expected()
        step = run.engine.forward_backward(run.batch(), *call)
        assert_step(step, expected, cell.tolerance)
        assert_tensors(run.engine.named_gradients(), expected.gradients, cell.tolerance)
        assert_number(run.engine.optimizer_step().grad_norm, expected.grad_norm, cell.tolerance)


@pytest.mark.parametrize(
    "backend",
    [pytest.param("fsdp:t2", marks=pytest.mark.world(2)), pytest.param("fsdp:d2t2", marks=FOUR)],
)
def test_replicated_weights_stay_bitwise_equal(backend: str) -> None:
    with started(backend, path=model_dir("qwen3", **UNEVEN), grad_sync="micro_batch") as engine:
        before = weights_of(engine)
        for step in range(10):
            engine.train_batch(local_batch(engine, global_batch(step)), loss)
        model, group = engine._components.model, engine.mesh["tp"].get_group()
        replicated = {name: p.to_local() for name, p in model.named_parameters() if re.search("norm|[kv]_proj", name)}
        # Two norms of tokens, two of heads and the projections of the only key head in each layer, and the last norm.
        assert len(replicated) == 2 * 6 + 1
        copies: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(copies, {name: p.tolist() for name, p in replicated.items()}, group=group)
        assert all(copy == copies[0] for copy in copies)
        after = weights_of(engine)
        assert not any(torch.equal(after[name], weight) for name, weight in before.items())


@pytest.mark.parametrize(
    ("write", "read", "changes"),
    [
        pytest.param("fsdp:t2", "fsdp:d2", {}, marks=pytest.mark.world(2)),
        pytest.param("fsdp:c2", "fsdp:t2", {}, marks=[pytest.mark.world(2)]),
        pytest.param("fsdp:t2", "fsdp:p2", UNEVEN, marks=[pytest.mark.world(2)]),
        pytest.param("fsdp:c2", "fsdp:t2", UNEVEN, marks=pytest.mark.world(2)),
        pytest.param("fsdp:d2t2", "fsdp:t4", UNEVEN, marks=FOUR),
        pytest.param("fsdp:p2t2", "fsdp:d2t2", UNEVEN, marks=FOUR),
    ],
)
def test_checkpoint_resumes_in_another_layout(write: str, read: str, changes: dict[str, Any], tmp_path: Path) -> None:
    meta, path = SaveLoadMeta(tmp_path / "run", weight_format="dcp"), model_dir("qwen3_tied", **changes)
    with started(write, value_head=True, path=path) as engine:
        engine.train_batch(local_batch(engine, global_batch(1)), loss)
        engine.save(meta)
        saved, moments = weights_of(engine), moments_of(engine)
        engine.train_batch(local_batch(engine, global_batch(2)), loss)
        went_on = weights_of(engine)
    with started(read, value_head=True, path=path) as engine:
        engine.load(meta)
        assert same_bits(weights_of(engine), saved)
        loaded = moments_of(engine)
        shared = loaded.keys() & moments.keys()  # a pipeline rank has those of its layers
        assert len(shared) > 20
        assert same_bits({name: loaded[name] for name in shared}, {name: moments[name] for name in shared})
        engine.train_batch(local_batch(engine, global_batch(2)), loss)
        for name, weight in weights_of(engine).items():
            change = (went_on[name] - saved[name]).norm()
            assert (weight - went_on[name]).norm() <= 2e-3 * change + 1e-6, name


def moments_of(engine: Any) -> dict[str, torch.Tensor]:
    """Return the full moments by parameter."""
    state = engine._components.optimizer.inner.state
    return {
        f"{name}.{key}": full_tensor(state[parameter][key])
        for name, parameter in engine._components.model.named_parameters()
        if "exp_avg" in state.get(parameter, {})
        for key in ("exp_avg", "exp_avg_sq")
    }


@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen3_moe", {}, r"'qwen3_moe' has no tensor-parallel plan.*llama, .*qwen2, .*qwen3"),
        ("smollm", {}, r"num_attention_heads = 9 does not divide over 2"),
        ("llama", {"intermediate_size": 49}, r"intermediate_size = 49 does not divide over 2"),
    ],
)
def test_unsupported_tensor_parallel_models_raise(family: str, changes: dict[str, Any], message: str) -> None:
    with (
        create_engine(config("fsdp:t2", path=model_dir(family, **changes))) as engine,
        pytest.raises(ValueError, match=message),
    ):
        engine.initialize(FinetuneSpec(total_train_steps=1))


@pytest.mark.parametrize(
    ("backend", "changes", "message"),
    [
        (
            "fsdp:t4",
            {"num_key_value_heads": 3},
            r"num_key_value_heads = 3 does not divide over 4 .* or a multiple of it",
        ),
        ("fsdp:t4", {"vocab_size": 9}, r"vocab_size = 9 leaves a rank of 4 .* choose a smaller t"),
        ("fsdp:d3t2", {"vocab_size": 113}, r"'fsdp:d3t2': vocab_size = 113 .* hidden_size = 32 not over the 3 ranks"),
    ],
)
def test_indivisible_numbers_raise(backend: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_plan(FAMILIES["llama"](**changes), ParallelDims.parse(backend), packed=True)


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
        mock.patch("areal.engine.fsdp.tensor_plans.PLANS", {"qwen3": plan}),
        create_engine(settings) as engine,
        pytest.raises(ValueError, match=r"leaves out .*q_norm.weight"),
    ):
        engine.initialize(FinetuneSpec(total_train_steps=1))


@pytest.mark.world(2)
def test_embedding_of_padding_token_is_not_trained() -> None:
    """Same as in torch's embedding; the row is on the second rank here."""
    path = model_dir("qwen3", pad_token_id=90, **UNEVEN)
    batch = [{"input_ids": torch.tensor([3, 90, 4, 90, 60])}]
    gradients = []
    for backend in ("fsdp:d2", "fsdp:t2"):
        with started(backend, path=path, mb_spec={"equal_batches": "allow"}) as engine:
            engine.forward_backward(batch, lambda out, b: -out.logprobs.sum())
            gradients.append({name: x.clone() for name, x in engine.named_gradients()})
    rows = [result["model.embed_tokens.weight"] for result in gradients]
    assert not rows[1][90].any()
    assert rows[1][4].any()
    assert torch.allclose(rows[0], rows[1], rtol=1e-4, atol=1e-7)
