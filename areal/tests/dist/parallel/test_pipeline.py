"""Pipelines on the FSDP engine: properties that the grid does not test."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GemmaConfig, GPT2Config, GraniteConfig, Qwen3Config

from areal.api import FinetuneSpec, MicroBatchSpec, SaveLoadMeta, TrainEngine
from areal.engine.fsdp.pipeline.schedule_specs import SCHEDULE_SPECS
from areal.engine.registry import create_engine
from areal.engine.torch.pipeline_split import PassThrough, check_chain, decoder_names, even_counts
from areal.tests.grid.agreement import assert_verbs_agree
from areal.tests.grid.layouts import Cell, Layout
from areal.tests.grid.models import VOCAB, model_dir
from areal.tests.harness.resume_chain import assert_resumes
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
from areal.utils.dtensor import local_part
from areal.utils.releases import fsdp_param_groups

FOUR = [pytest.mark.world(4)]
DEEP = {"num_hidden_layers": 4}


def options(schedule: str, family: str = "qwen3", **changes: Any) -> dict[str, Any]:
    return {"path": model_dir(family, **DEEP, **changes), "fsdp": {"pipeline_schedule": schedule}}


def layout(schedule: str) -> str:
    return "fsdp:p2" if SCHEDULE_SPECS[schedule].chunks == "one" else "fsdp:p2v2"


SCHEDULES = [pytest.param(name, id=name, marks=pytest.mark.world(2)) for name in SCHEDULE_SPECS]
TIED = [pytest.param(name, id=name, marks=pytest.mark.world(2)) for name in ("1F1B", "ZBVZeroBubble")]


# ---- stages


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stage_has_its_layers_and_broadcasts_results(schedule: str, tmp_path: Path) -> None:
    given = options(schedule)
    on_disk = load_file(Path(given["path"]) / "model.safetensors")
    with started(layout(schedule), **given) as engine:
        chunks: Any = engine._components.model
        assert all(isinstance(chunk, FSDPModule) for chunk in chunks)
        local_names = {name for name, _ in chunks.own()}
        names: list[Any] = [None, None]
        dist.all_gather_object(names, local_names)
        assert not names[0] & names[1]
        assert len(names[0] | names[1]) == len(on_disk)
        assert sum("layers" in name for name in names[0]) == sum("layers" in name for name in names[1])
        assert same_bits(weights_of(engine), on_disk)
        engine.save(SaveLoadMeta(tmp_path / "saved"))
        assert same_bits(load_file(tmp_path / "saved" / "model.safetensors"), on_disk)

        mbs = engine.microbatches(global_batch())
        result = engine.forward_backward_batch(
            mbs, lambda out, mb: (None, (mb.index, mb.sample_ids, out.logprobs.detach())), forward_only=True
        )
        everyone: list[Any] = [None, None]
        dist.all_gather_object(everyone, [(index, ids, x.tolist()) for index, ids, x in result])
        assert everyone[0] == everyone[1]
        assert [index for index, *_ in everyone[0]] == [mb.index for mb in mbs.real]
        assert len(mbs.real) > 2


@pytest.mark.world(2)
def test_pipeline_with_changing_lengths_and_tiny_batches() -> None:
    alone: dict[str, list[float]] = {}
    for backend in ("fsdp:d2", "fsdp:p2"):
        with started(backend, path=model_dir("qwen3", **DEEP), mb_spec=MicroBatchSpec(max_tokens_per_mb=64)) as engine:
            result = []
            for seed, most in enumerate((38, 2, 17, 64, 5)):
                batch = [
                    {name: x[:most] if x.dim() else x for name, x in sample.items()} for sample in global_batch(seed)
                ]
                step = engine.train_batch(local_batch(engine, batch), loss)
                result += [step.loss, step.grad_norm or 0.0]
            alone[backend] = result
    (_, first), (_, second) = alone.items()
    assert second == pytest.approx(first, rel=2e-4)


@pytest.mark.world(2)
def test_layers_are_assigned_to_stages_as_configured() -> None:
    with started("fsdp:p2", path=model_dir("qwen3", **DEEP), fsdp={"pipeline_layers": (1, 3)}) as engine:
        chunks: Any = engine._components.model
        mine_here = {name.split(".")[3] for name, _ in chunks.own() if ".layers." in name}
        assert mine_here == ({"0"} if chunks.rank == 0 else {"1", "2", "3"})
        split = engine.train_batch(global_batch(), loss)
    with started("fsdp:d2", path=model_dir("qwen3", **DEEP)) as engine:
        assert engine.train_batch(local_batch(engine, global_batch()), loss).grad_norm == pytest.approx(
            split.grad_norm, rel=1e-5
        )


def test_remaining_layers_go_to_middle_stages_first() -> None:
    assert [even_counts(n, 4) for n in (4, 5, 6, 7)] == [[1, 1, 1, 1], [1, 2, 1, 1], [1, 2, 2, 1], [2, 2, 2, 1]]
    assert even_counts(3, 2) == [2, 1]


PRODUCTS = [
    Cell(
        Layout("fsdp:e2p2v2", "zb", {"fsdp": {"pipeline_schedule": "InterleavedZeroBubble"}}, changes=DEEP), "qwen3_moe"
    ),
    Cell(Layout("fsdp:e2p2v2", "zbv", {"fsdp": {"pipeline_schedule": "ZBVZeroBubble"}}, changes=DEEP), "deepseek_v3"),
    Cell(Layout("fsdp:p2v2t2", "zbv", {"fsdp": {"pipeline_schedule": "ZBVZeroBubble"}}, changes=DEEP), "qwen3_tied"),
    Cell(Layout("fsdp:c2p2v2", "zb", {"fsdp": {"pipeline_schedule": "InterleavedZeroBubble"}}, changes=DEEP), "qwen3"),
    Cell(Layout("fsdp:d2p2v2", "interleaved", {"activation_checkpointing": "full"}, changes=DEEP), "qwen3_tied"),
]
"""Layouts with more than two kinds of parallelism."""


@pytest.mark.parametrize("cell", [pytest.param(cell, id=cell.layout.name, marks=FOUR) for cell in PRODUCTS])
def test_schedules_combine_with_other_parallelism(cell: Cell) -> None:
    assert_verbs_agree(replace(cell, cut="tokens24"))


# ---- reductions


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the gradient reductions of FSDP groups on this rank."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    counts: Counter[str] = Counter()
    reduce = _fsdp_param_group.foreach_reduce

    def counting(*args: Any, **named: Any) -> Any:
        counts["reductions"] += 1
        return reduce(*args, **named)

    with mock.patch.object(_fsdp_param_group, "foreach_reduce", counting):
        yield counts


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_pipeline_call_reduces_each_group_once(schedule: str) -> None:
    with started(layout(schedule), **options(schedule)) as engine, counted() as counts:
        chunks: Any = engine._components.model
        groups = sum(len(fsdp_param_groups(module)) for module in chunks.modules() if isinstance(module, FSDPModule))
        assert groups >= 2
        assert len(engine.microbatches(global_batch())) > 2
        for calls in (1, 2):
            engine.forward_backward(global_batch(), loss)
            assert counts["reductions"] == calls * groups
        engine.eval_batch(global_batch(), loss)
        engine.optimizer_step()
        assert counts["reductions"] == 2 * groups


# ---- a tied embedding


@pytest.mark.parametrize("schedule", TIED)
@pytest.mark.parametrize("state", ["float32", "bfloat16"])
def test_copies_of_tied_embedding_stay_bitwise_equal(schedule: str, state: str) -> None:
    given = options(schedule, "qwen3_tied")
    given["fsdp"]["optimizer_state_dtype"] = state
    with started(layout(schedule), **given) as engine:
        before = weights_of(engine)
        for step in range(20):
            engine.train_batch(global_batch(step), loss)
        chunks: Any = engine._components.model
        name = "hf.model.embed_tokens.weight"
        here = [local_part(x).tolist() for n, x in chunks.stored() if n == name]
        everywhere: list[Any] = [None, None]
        dist.all_gather_object(everywhere, here)
        first, second = [x for rank in everywhere for x in rank]
        assert first == second
        assert not torch.equal(weights_of(engine)["model.embed_tokens.weight"], before["model.embed_tokens.weight"])


@pytest.mark.parametrize("schedule", TIED)
def test_reading_gradients_then_accumulating_counts_each_once(schedule: str) -> None:
    given = options(schedule, "qwen3_tied")
    with started("fsdp:d2", path=given["path"]) as engine:
        for seed in (1, 2):
            engine.forward_backward(local_batch(engine, global_batch(seed)), loss)
        expected, norm = gradients_of(engine), engine.optimizer_step().grad_norm
    with started(layout(schedule), **given) as engine:
        engine.forward_backward(global_batch(1), loss)
        gradients_of(engine)
        engine.eval_batch(global_batch(3), loss)
        engine.forward_backward(global_batch(2), loss)
        for _ in range(2):
            for name, gradient in engine.named_gradients():
                assert (gradient - expected[name]).abs().max() <= 2e-5 * expected[name].abs().max(), name
        assert engine.optimizer_step().grad_norm == pytest.approx(norm, rel=1e-5)


# ---- resume


@pytest.mark.parametrize(
    ("family", "chain"),
    [
        pytest.param("qwen3_tied", ["p2v2/ZBVZeroBubble", "d2", "p2/GPipe"], marks=pytest.mark.world(2)),
        pytest.param("qwen3_moe", ["p2", "c2", "p2v2/Interleaved1F1B", "d2"], marks=[pytest.mark.world(2)]),
        pytest.param("qwen3_tied", ["p4", "d2p2", "p2t2", "c2p2"], marks=FOUR),
    ],
)
def test_checkpoint_resumes_in_another_layout(family: str, chain: list[str], tmp_path: Path) -> None:
    assert_resumes(model_dir(family, **DEEP), chain, tmp_path, bound=2e-3)


@pytest.mark.world(2)
def test_random_weights_do_not_depend_on_stages() -> None:
    path = model_dir("qwen3_tied", **DEEP)
    with started(
        "fsdp:p2v2", init_from_scratch=True, seed=3, path=path, fsdp={"pipeline_schedule": "ZBVZeroBubble"}
    ) as one:
        result = weights_of(one)
        one.train_batch(global_batch(), loss)
    with started("fsdp:d2", init_from_scratch=True, seed=3, path=path) as other:
        assert same_bits(weights_of(other), result)


# ---- errors


@pytest.mark.parametrize(
    ("backend", "changes", "message"),
    [
        ("fsdp:d2", {"fsdp": {"pipeline_schedule": "GPipe"}}, "pipeline_schedule = 'GPipe' with backend = 'fsdp:d2'"),
        ("fsdp:p2", {"fsdp": {"pipeline_schedule": "Interleaved1F1B"}}, "'Interleaved1F1B'.*needs v2 or more"),
        ("fsdp:p2v2", {"fsdp": {"pipeline_schedule": "1F1B"}}, "'1F1B'.*needs no v"),
        ("fsdp:p2v3", {"fsdp": {"pipeline_schedule": "ZBVZeroBubble"}}, "'ZBVZeroBubble'.*needs v2 in"),
        (
            "fsdp:p2v2",
            {"fsdp": {"pipeline_schedule": "ZBVZeroBubble", "reshard_after_forward": True}},
            "leave fsdp.reshard_after_forward out",
        ),
        (
            "fsdp:p2v2",
            {"fsdp": {"pipeline_schedule": "InterleavedZeroBubble"}, "activation_checkpointing": "full"},
            "activation_checkpointing = 'full' needs another schedule",
        ),
        (
            "fsdp:p2v2",
            {"fsdp": {"pipeline_schedule": "InterleavedZeroBubble"}, "lora": {"rank": 2}},
            "lora needs another schedule",
        ),
        ("fsdp:p2", {"grad_sync": "micro_batch"}, "grad_sync = 'micro_batch'.*leave it out"),
    ],
)
def test_invalid_pipeline_settings_raise_at_creation(backend: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        create_engine(config(backend, path="nowhere", **changes))


@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("backend", "changes", "message"),
    [
        ("fsdp:p2v2", {}, "4 stages, and the model 2 layers"),
        ("fsdp:p2", {"fsdp": {"pipeline_layers": (1, 2)}}, r"pipeline_layers = \(1, 2\): give 2 numbers"),
        ("fsdp:p2", {"fsdp": {"pipeline_layers": (2,)}}, r"pipeline_layers = \(2,\): give 2 numbers"),
        ("fsdp:p2", {"fsdp": {"attention": "rows"}}, "'rows' with p: pipelines need packed attention"),
    ],
)
def test_invalid_pipeline_splits_raise_on_every_rank(backend: str, changes: dict[str, Any], message: str) -> None:
    engine = create_engine(config(backend, **changes))
    refused_by(engine, message)
    with started("fsdp:p2") as after:
        after.train_batch(global_batch(), loss)


SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (GraniteConfig(embedding_multiplier=3.0, **SMALL), "'granite' cannot be cut.*changes hidden states outside"),
        (GPT2Config(), r"'gpt2' cannot be cut.*\['wpe', 'ln_f'\] beside its embedding"),
        (Qwen3Config(**SMALL), None),
        (GemmaConfig(head_dim=8, **SMALL), None),
        (Gemma3TextConfig(head_dim=8, **SMALL), None),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_decoder_without_layer_sequence_raises(made: Any, message: str | None) -> None:
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(made)
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        check_chain(hf, decoder_names(hf))


def refused_by(engine: TrainEngine, message: str) -> None:
    with engine, pytest.raises(ValueError, match=message):
        engine.initialize(FinetuneSpec(total_train_steps=1))


# ---- one model, split into stages


def test_missing_modules_of_a_stage_return_their_input() -> None:
    layer = torch.nn.Linear(2, 2)
    layer.attention_type = "sliding_attention"  # type: ignore[assignment]
    absent = PassThrough(copy.deepcopy(layer))
    x: Tensor = torch.rand(3, 2)
    assert absent(x, None, cache=1) is x
    assert absent.attention_type == "sliding_attention"
    assert not list(absent.parameters())
