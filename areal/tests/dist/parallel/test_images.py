"""Families that take images, packed: outputs and gradients of every layout beside transformers, one sequence at a time, in float64."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from areal.api import Batch, LoRAConfig, MicroBatchSpec, ParallelDims, SaveLoadMeta, TokenOutputs
from areal.dispatch.shards import ShardPlan, plan_shards
from areal.engine.batch_rules import rules_of
from areal.engine.fsdp.activation_checkpointing import RecomputedForward
from areal.engine.fsdp.parallelize import transformer_layers
from areal.engine.fsdp.tensor_plans import PLANS
from areal.engine.model.vision import vision_layers
from areal.tests.grid.compare import assert_rows, assert_tensors
from areal.tests.grid.float64_mode import float64_everywhere
from areal.tests.grid.models import adapter_dir
from areal.tests.grid.reference import Reference, Sample
from areal.tests.grid.vision_models import GRIDS, SQUARE, VISION_FAMILIES, VISION_NAMES, images, square_images, tokens
from areal.tests.harness.tiny import family_dir, gradients_as_in_files, gradients_of, started, writing
from areal.tests.harness.world import cached, record, world
from areal.utils.data import pad
from areal.utils.data.images import IMAGE_KEYS

FLOAT64: dict[str, Any] = {"dtype": "float64", "master_dtype": "float64", "grad_reduce_dtype": "float64"}


def samples(family: str) -> list[Sample]:
    """Return sequences with no, one and two images, at their beginning, inside and at their end."""
    a, b, c, d = (SQUARE,) * 4 if family == "gemma3" else GRIDS

    def pictures(*grids: tuple[int, int, int], seed: int) -> dict[str, Tensor]:
        return square_images(len(grids), seed=seed) if family == "gemma3" else images(*grids, seed=seed)

    made: list[dict[str, Tensor]] = [
        {"input_ids": tokens(3, a, 5, seed=1), **pictures(a, seed=1)},
        {"input_ids": tokens(9, seed=2)},
        {"input_ids": tokens(b, 4, c, seed=3), **pictures(b, c, seed=3)},
        {"input_ids": tokens(2, d, 1, d, 6, seed=4), **pictures(d, d, seed=4)},
        {"input_ids": tokens(c, 3, seed=5), **pictures(c, seed=5)},
    ]
    # A prompt with an image, with two answers; the same tokens with another image; and a longer text after the first image.
    prompt, answers = tokens(4, a, 3, seed=6), [tokens(n, seed=n) for n in (5, 7)]
    made += [{"input_ids": torch.cat([prompt, answer]), **pictures(a, seed=6)} for answer in answers]
    made.append({"input_ids": torch.cat([prompt, answers[0]]), **pictures(a, seed=7)})
    return [{**sample, "advantages": advantages(sample)} for sample in made]


def advantages(sample: Sample) -> Tensor:
    length = len(sample["input_ids"])
    return torch.randn(length, generator=torch.Generator().manual_seed(length), dtype=torch.float64)


def loss(out: TokenOutputs, batch: Batch) -> Tensor:
    return -(out.logprobs * batch["advantages"]).sum()


def expected(family: str) -> tuple[Any, list[Tensor]]:
    path = family_dir(family)

    def compute() -> tuple[Any, list[Tensor]]:
        reference, everything = Reference(path), samples(family)
        logprobs = reference.forward(everything, ("logprobs",))["logprobs"]
        reference.step(everything, loss, lambda batch: torch.tensor(1.0), divide_by=1.0)
        return gradients_as_in_files(reference.model), logprobs

    return cached("images", path, compute)


WAYS: dict[str, dict[str, Any]] = {
    "d1": {},
    "d2": {},
    "c2-ulysses": {"fsdp": {"context_parallel": "ulysses"}},
    "c2-gather_kv": {"fsdp": {"context_parallel": "gather_kv"}},
    "d1-shared": {"mb_spec": MicroBatchSpec(max_tokens_per_mb=64, share_prefixes=True)},
    "c2-shared": {"mb_spec": MicroBatchSpec(max_tokens_per_mb=64, share_prefixes=True)},
    "d1-full": {"activation_checkpointing": "full"},
    "d2-selective": {"activation_checkpointing": "selective"},
    "t2": {},
    "t2-full": {"activation_checkpointing": "full"},
    "e2": {},
    "d1-frozen": {"fsdp": {"freeze_vision": True}},
}
"""Options of an engine by its layout and what they do."""


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, marks=pytest.mark.world(ParallelDims.parse(f"fsdp:{way.partition('-')[0]}").world_size))
        for way in WAYS
    ],
)
@pytest.mark.parametrize("family", sorted(VISION_FAMILIES))
def test_layouts_compute_the_same(family: str, way: str) -> None:
    if family not in PLANS and way.startswith("t"):
        pytest.skip("it has no tensor-parallel plan, and is refused")
    if not family.endswith("moe") and way.startswith("e"):
        pytest.skip("it has no experts, and is refused")
    path = family_dir(family)
    gradients, logprobs = expected(family)
    if way.endswith("frozen"):
        gradients = {name: 0 * x if re.match(VISION_NAMES, name) else x for name, x in gradients.items()}
    options = {"mb_spec": MicroBatchSpec(max_tokens_per_mb=64), **FLOAT64, **WAYS[way]}
    with float64_everywhere(), started(f"fsdp:{way.partition('-')[0]}", path=path, **options) as engine:
        everything = samples(family)
        local = list(range(len(everything)))[engine.dp_rank :: engine.dp_size]
        batch = [everything[i] for i in local]
        out = engine.forward_batch(batch)
        engine.forward_backward(batch, loss, normalization="sum")
        of_rows = assert_rows(out, logprobs, local, 1e-10)
        error = assert_tensors(gradients_of(engine).items(), gradients, 1e-10)
    record("images: log-probs, gradients", f"{family} {way}", error=f"{of_rows:.0e} {error:.0e}")


@pytest.mark.world(2)
@pytest.mark.parametrize("freeze", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_ranks_without_images_keep_in_step(family: str, freeze: bool) -> None:
    """One rank has a sequence of text, and fillers, while the other one has images in several micro-batches."""
    path, everything = family_dir(family), samples(family)
    gradients, _ = expected(family)
    options = {"mb_spec": MicroBatchSpec(max_tokens_per_mb=24), "fsdp": {"freeze_vision": freeze}, **FLOAT64}
    local = [everything[1]] if world().rank else everything[:1] + everything[2:]
    with float64_everywhere(), started("fsdp:d2", path=path, **options) as engine:
        assert len(engine.microbatches(local)) > 2
        engine.forward_backward(local, loss, normalization="sum")
        made = dict(gradients_of(engine))
        if freeze:
            made = {name: gradients[name] if re.match(VISION_NAMES, name) else x for name, x in made.items()}
        error = assert_tensors(made.items(), gradients, 1e-10)
    record(
        "images: gradients beside a rank of text", f"{family} {'frozen' if freeze else 'trained'}", error=f"{error:.0e}"
    )


@pytest.mark.world(2)
@pytest.mark.parametrize("share", [False, True], ids=["plain", "shared"])
@pytest.mark.parametrize("form", ["list", "padded"])
def test_shards_of_a_batch_keep_their_images(form: str, share: bool) -> None:
    """As a worker group divides a batch: a sample and its images go to one rank, and equal prompts stay together."""
    path, everything = family_dir("qwen2_5_vl"), samples("qwen2_5_vl")
    gradients, logprobs = expected("qwen2_5_vl")
    spec = MicroBatchSpec(max_tokens_per_mb=64, share_prefixes=share)
    with float64_everywhere(), started("fsdp:d2", path=path, mb_spec=spec, **FLOAT64) as engine:
        rules = rules_of(engine)
        assert rules is not None
        check = partial(rules.plan, outputs=("logprobs",), trees=False)
        plan = plan_shards(everything if form == "list" else padded(everything), spec, 2, check=check)
        out = engine.forward_batch(plan.shards[engine.dp_rank])
        engine.forward_backward(plan.shards[engine.dp_rank], loss, normalization="sum")
        of_rows = assert_rows(rows_of(out, plan, engine.dp_rank), logprobs, plan.indices[engine.dp_rank], 1e-10)
        error = assert_tensors(gradients_of(engine).items(), gradients, 1e-10)
    if share:
        assert any({5, 6} <= set(members) for members in plan.indices)
    record("images: shards of a batch", f"{form} share={share}", error=f"{of_rows:.0e} {error:.0e}")


def padded(everything: list[Sample]) -> dict[str, Any]:
    """Return samples as one padded batch, with a list of images."""
    ids, mask = pad([sample["input_ids"] for sample in everything])
    batch = {"input_ids": ids, "attention_mask": mask, "advantages": pad([x["advantages"] for x in everything])[0]}
    return batch | {key: [sample.get(key) for sample in everything] for key in IMAGE_KEYS}


def rows_of(out: Any, plan: ShardPlan, rank: int) -> list[Tensor]:
    """Return outputs of a shard as one tensor for each sample."""
    lengths = [plan.form.seqlens[i] for i in plan.indices[rank]]
    return [row[:length] for row, length in zip(out, lengths, strict=True)]


LORA = LoRAConfig(rank=3, alpha=5.0)


@pytest.mark.parametrize(
    "layout", [pytest.param("d1", marks=pytest.mark.world(1)), pytest.param("c2", marks=pytest.mark.world(2))]
)
@pytest.mark.parametrize("family", sorted(VISION_FAMILIES))
def test_adapters_are_of_the_decoder(family: str, layout: str) -> None:
    path = family_dir(family)
    with writing():
        adapter = adapter_dir(path, LORA)
    expected = Reference(path, adapter=adapter).step(
        samples(family), loss, lambda batch: torch.tensor(1.0), divide_by=1.0
    )
    assert expected.gradients
    assert not [name for name in expected.gradients if re.match(VISION_NAMES, name)]
    with float64_everywhere(), started(f"fsdp:{layout}", path=path, lora=LORA, **FLOAT64) as engine:
        engine.adapters.load(engine.adapters.selected, adapter)
        engine.forward_backward(samples(family), loss, normalization="sum")
        error = assert_tensors(gradients_of(engine).items(), expected.gradients, 1e-10)
    record("images: gradients of adapters", f"{family} {layout}", error=f"{error:.0e}")


@pytest.mark.world(1, 2)
@pytest.mark.parametrize("family", sorted(VISION_FAMILIES))
def test_a_saved_model_has_its_tower(family: str, tmp_path: Path) -> None:
    """A step moves the tower, and transformers loads what was saved."""
    path = family_dir(family)
    local = samples(family)[world().rank :: world().size]
    with started(f"fsdp:d{world().size}", path=path) as engine:
        assert engine.train_batch(local, loss).update_successful
        after = engine.forward_batch([samples(family)[2]])[0]
        engine.save(SaveLoadMeta(tmp_path / "saved", weight_format="hf"))
    before, saved = (AutoModelForImageTextToText.from_pretrained(folder) for folder in (path, tmp_path / "saved"))
    moved = {
        name
        for (name, x), y in zip(before.named_parameters(), saved.parameters(), strict=True)
        if not torch.equal(x, y)
    }
    assert moved == {name for name, _ in before.named_parameters()}
    reference = Reference(str(tmp_path / "saved")).forward([samples(family)[2]], ("logprobs",))["logprobs"]
    assert_rows([after], reference, [0], 1e-5)


@pytest.mark.world(1)
def test_layers_of_the_tower_recompute_beside_compiled_layers() -> None:
    """Graphs of the decoder's layers recompute themselves; the tower is not compiled."""
    fsdp = {"compile": True, "compile_backend": "aot_eager"}
    path = family_dir("qwen2_5_vl")
    with started("fsdp:d1", path=path, fsdp=fsdp, activation_checkpointing="selective") as engine:
        model: Any = engine._components.model[0]
        recomputed = [isinstance(layer.forward, RecomputedForward) for layer in vision_layers(model.hf)]
        assert recomputed == [True] * len(recomputed)
        assert not any(isinstance(layer.forward, RecomputedForward) for layer in transformer_layers(model))


@pytest.mark.world(2)
def test_weights_gathered_ahead_do_not_outlive_a_call(tmp_path: Path) -> None:
    """The last layer of a forward gathers the first layer of the next one, before whose forward the weights change."""
    family = "qwen3_5_moe"
    local = samples(family)[world().rank :: world().size]
    everyone = range(len(local))
    with started("fsdp:e2", path=family_dir(family)) as engine:
        model: Any = engine._components.model[0]
        last: Any = transformer_layers(model)[-1]
        last.set_modules_to_forward_prefetch(vision_layers(model.hf)[:1])
        meta = SaveLoadMeta(tmp_path / "saved", weight_format="hf")
        engine.save(meta)
        before = engine.forward_batch(local)
        engine.forward_backward(local, loss)
        engine.eval_batch(local, loss)
        engine.optimizer_step()
        after, again = (engine.forward_batch(local) for _ in range(2))
        assert_rows(after, again, everyone, 1e-6)
        assert all((x - y).abs().max() > 1e-4 for x, y in zip(after, before, strict=True))
        engine.load(meta)
        assert_rows(engine.forward_batch(local), before, everyone, 1e-6)


@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("backend", "options", "message"),
    [
        ("fsdp:p2", {}, "takes images.*leave p out"),
        ("fsdp:d2", {"fsdp": {"attention": "rows"}}, "fsdp.attention = 'rows' with a model that takes images"),
        ("fsdp:d2", {"fsdp": {"text_only": True, "freeze_vision": True}}, "freeze_vision = True.*on text alone"),
        ("megatron:d2", {}, "qwen2_5_vl"),
        ("jax:d2", {}, "qwen2_5_vl"),
    ],
    ids=["pipeline", "rows", "frozen", "megatron", "jax"],
)
def test_layouts_that_cannot_carry_images_are_refused(backend: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message), started(backend, path=family_dir("qwen2_5_vl"), **options):
        raise AssertionError("not reached")
