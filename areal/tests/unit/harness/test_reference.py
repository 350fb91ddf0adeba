"""Float64 reference compared with transformers and torch where these compute the same directly."""

from itertools import chain
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from areal.api import OptimizerConfig
from areal.tests.grid.cases import CASES, Case, as_input, dp_shard_indices, rows, samples
from areal.tests.grid.float64_mode import float64_everywhere
from areal.tests.grid.losses import OBJECTIVES, Objective, nll
from areal.tests.grid.models import FAMILIES, model_dir
from areal.tests.grid.reference import Reference, learning_rate


@pytest.mark.parametrize("family", FAMILIES)
def test_reference_names_and_values_equal_files(family: str) -> None:
    files = {
        name: weight
        for file in Path(model_dir(family)).glob("*.safetensors")
        for name, weight in load_file(file).items()
    }
    named = dict(Reference(model_dir(family)).named_tensors())
    assert named.keys() == files.keys()
    assert all(torch.equal(named[name], files[name].double()) for name in files)


@pytest.mark.parametrize("family", ["qwen2", "gemma3_text", "qwen3_moe"])
def test_reference_loss_and_gradients_equal_transformers(family: str) -> None:
    batch = [
        {"input_ids": sample["input_ids"], "loss_mask": torch.ones(len(sample["input_ids"]))}
        for sample in samples(CASES["ragged"])
    ]
    reference = Reference(model_dir(family))
    step = reference.step(batch, nll, OBJECTIVES["nll"].weight_fn)
    with float64_everywhere():
        model = AutoModelForCausalLM.from_pretrained(
            model_dir(family), dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
        )
        predicted = [len(sample["input_ids"]) - 1 for sample in batch]
        losses = [
            model(sample["input_ids"][None], labels=sample["input_ids"][None]).loss * n
            for sample, n in zip(batch, predicted, strict=True)
            if n
        ]
        (torch.stack(losses).sum() / sum(predicted)).backward()
    assert step.weights == {"loss": float(sum(predicted))}
    assert step.loss == pytest.approx(sum(losses).item() / sum(predicted), rel=1e-12)
    ours, theirs = dict(reference.model.named_parameters()), dict(model.named_parameters())
    largest = max(parameter.grad.abs().max() for parameter in theirs.values())
    assert all((ours[name].grad - theirs[name].grad).abs().max() < 1e-12 * largest for name in theirs)
    assert step.grad_norm == pytest.approx(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)), rel=1e-12)


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=lambda objective: objective.name)
def test_reference_gradients_equal_finite_differences(objective: Objective) -> None:
    case = CASES["zero_rank"]
    batch = samples(case, top_targets=objective.top_targets)
    head = torch.linspace(-1, 1, 32)[None] if objective.value_head else None
    reference = Reference(model_dir("qwen3"), temperature=0.75, value_head=head)
    step = reference.step(batch, objective.loss_fn, objective.weight_fn)
    weight = dict(reference.named_parameters())["model.layers.1.mlp.up_proj.weight"]
    direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    losses = []
    for shift in (1e-5, -2e-5):
        weight.data += shift * direction
        losses.append(reference.step(batch, objective.loss_fn, objective.weight_fn, gradients=False).loss)
    slope = (losses[0] - losses[1]) / 2e-5
    assert slope == pytest.approx(
        (step.gradients["model.layers.1.mlp.up_proj.weight"] * direction).sum().item(), rel=1e-6
    )
    assert abs(slope) > 1e-4


def test_reference_learning_rates() -> None:
    linear = learning_rate(OptimizerConfig(lr_scheduler="linear", warmup_steps=2, min_lr_ratio=0.1), 10)
    assert [linear(i) for i in (0, 1, 2, 6, 10, 99)] == pytest.approx([0.5, 1.0, 1.0, 0.55, 0.1, 0.1])
    cosine = learning_rate(OptimizerConfig(lr_scheduler="cosine"), 10)
    assert [cosine(i) for i in (0, 5, 10)] == pytest.approx([1.0, 0.5, 0.0])
    wsd = learning_rate(OptimizerConfig(lr_scheduler="wsd", warmup_steps=1, decay_ratio=0.4), 10)
    assert [wsd(i) for i in (0, 1, 6, 8, 10)] == pytest.approx([1.0, 1.0, 1.0, 0.5, 0.0])


@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_dp_ranks_get_uneven_shards(case: Case, dp_size: int) -> None:
    shards = [dp_shard_indices(case, rank, dp_size) for rank in range(dp_size)]
    assert sorted(chain.from_iterable(shards)) == list(range(len(case.lengths)))
    assert all(shards)
    assert dp_size == 1 or len({len(chosen) for chosen in shards}) > 1
    for chosen in shards:
        batch = samples(case)
        padded = as_input([batch[i] for i in chosen], "padded")
        lengths = [case.lengths[i] for i in chosen]
        assert padded["attention_mask"].sum(1).tolist() == lengths
        back = rows(padded["input_ids"] * padded["attention_mask"], lengths)
        assert all(torch.equal(row, batch[i]["input_ids"]) for row, i in zip(back, chosen, strict=True))
