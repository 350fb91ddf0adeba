"""Balancing losses and expert load computed by hand. Refused replays are tested in ``dist/parallel/test_moe_layouts.py``."""

import math

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GptOssConfig, Phi3Config

from areal.api import ParallelDims, TrainEngineConfig
from areal.api.sections.experts import MoEConfig
from areal.engine.attention.context_parallel import ContextParallel
from areal.engine.batch_rules import Experts
from areal.engine.fsdp.expert_parallel import check_experts
from areal.engine.model.stacked_experts import stacked_experts
from areal.engine.moe.balance_loss import AUX_LOSS, Z_LOSS, RoutingSums, assignments, balance_loss, router_z_loss
from areal.engine.moe.routing import ExpertRouting, Tally
from areal.engine.stream.layout import layout_of
from areal.tests.grid.models import OUTSIDE_THE_GRID
from areal.utils.data import plan_batch

CU = torch.tensor([0, 3, 4], dtype=torch.int32)


def test_balance_loss_of_even_load_is_one_per_sequence() -> None:
    experts = torch.tensor([[0, 1], [2, 3], [0, 1], [2, 3]])
    even = balance_loss(torch.zeros(4, 4), assignments(experts, 4), torch.tensor([0, 2, 4], dtype=torch.int32))
    assert even.item() == pytest.approx(2.0)


def test_balance_loss_is_computed_per_sequence() -> None:
    """Two experts, one per token: the first sequence routes 2 of 3 tokens to expert 0, the second routes its only token there."""
    logits = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 2.0], [3.0, 0.0]], dtype=torch.float64)
    experts = torch.tensor([[0], [0], [1], [0]])
    p = [1 / (1 + math.exp(-1)), 1 / (1 + math.exp(2)), 1 / (1 + math.exp(-3))]
    mean = (2 * p[0] + p[1]) / 3
    expected = 2 * (2 / 3 * mean + 1 / 3 * (1 - mean)) + 2 * p[2]
    assert balance_loss(logits, assignments(experts, 2), CU).item() == pytest.approx(expected, rel=1e-14)


def test_balance_loss_has_no_gradient_through_expert_choice() -> None:
    logits = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    chosen = assignments(logits.topk(2).indices, 4)
    torch.autograd.gradcheck(lambda x: balance_loss(x, chosen, CU), (logits,))
    torch.autograd.gradcheck(router_z_loss, (logits,))


def test_z_loss_is_squared_log_sum_exp() -> None:
    logits = torch.tensor([[0.0, math.log(3)], [5.0, 5.0]], dtype=torch.float64)
    assert router_z_loss(logits).item() == pytest.approx(math.log(4) ** 2 + (5 + math.log(2)) ** 2, rel=1e-14)


def test_half_precision_router_logits_are_summed_in_float32() -> None:
    logits = torch.randn(4, 4, dtype=torch.bfloat16)
    assert router_z_loss(logits).dtype == torch.float32
    assert balance_loss(logits, assignments(torch.tensor([[0], [1], [2], [3]]), 4), CU).dtype == torch.float32


def test_expert_load_is_summed_over_stages_and_ranks() -> None:
    total = RoutingSums()
    for sums in (RoutingSums({}, {0: [4.0, 0.0]}), RoutingSums({}, {0: [2.0, 2.0], 1: [1.0, 0.0]})):
        total.merge(sums)
    assert total.loads == {0: [6.0, 2.0], 1: [1.0, 0.0]}
    assert {name: (metric.value, metric.reduce) for name, metric in total.metrics().items()} == {
        "moe/load_max_over_mean": (1.75, "mean"),
        "moe/load_max_over_mean_worst": (2.0, "max"),
        "moe/idle_experts": (1.0, "mean"),
    }
    assert RoutingSums().metrics() == {}


def test_recomputed_layer_counts_once_and_keeps_gradient() -> None:
    batch = [{"input_ids": torch.tensor([1, 2, 3])}, {"input_ids": torch.tensor([4])}]
    config = TrainEngineConfig(path="x")
    (mb,) = plan_batch(batch, config.mb_spec).build(n_mbs=1, device=torch.device("cpu"))
    layout = layout_of(mb, ContextParallel(None), rows=False)
    routing = ExpertRouting(
        MoEConfig(aux_loss=0.5, z_loss=2.0, statistics=True), Experts(1, 4, 2), [ContextParallel(None)]
    )
    logits = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    weights, experts = logits.softmax(-1).topk(2)
    with routing.counting({AUX_LOSS: 2.0, Z_LOSS: 4.0}, 3.0) as tally:
        seen = routing.of(mb, layout, record=False)
        assert seen is not None
        with torch.no_grad():
            seen.watch(0, logits, experts, weights)
        (seen.watch(0, logits, experts, weights) * 0.0).sum().backward()
    aux, z = balance_loss(logits, assignments(experts, 4), CU), router_z_loss(logits)
    sums = tally.sums()
    assert sums.terms == pytest.approx({AUX_LOSS: 0.5 * aux.item(), Z_LOSS: 2.0 * z.item()})
    assert sum(sums.loads[0]) == 8
    (expected,) = torch.autograd.grad(3.0 * (0.5 * aux / 2.0 + 2.0 * z / 4.0), logits)
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, expected)
    after = routing.of(mb, layout, record=False)
    assert after is not None
    assert after.tally is None, "nothing is counted after the call"


def test_non_finite_balancing_loss_raises() -> None:
    batch = [{"input_ids": torch.tensor([1, 2])}]
    (mb,) = plan_batch(batch, TrainEngineConfig(path="x").mb_spec).build(n_mbs=1, device=torch.device("cpu"))
    tally = Tally({Z_LOSS: 1.0}, {Z_LOSS: 1.0}, statistics=False)
    tally.add(mb, 0, torch.full((2, 4), torch.inf), torch.tensor([[0, 1], [0, 1]]))
    with pytest.raises(ValueError, match="moe_z_loss is inf"):
        tally.sums()


@pytest.mark.parametrize(
    "wrong", [{"aux_loss": -0.1}, {"z_loss": float("nan")}, {"aux_loss": float("inf")}, {"other": 1}]
)
def test_invalid_moe_settings_raise(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        TrainEngineConfig(path="x", moe=wrong)


@pytest.mark.parametrize("asked", [{"aux_loss": 0.1}, {"z_loss": 0.1}, {"statistics": True}])
def test_moe_options_raise_without_experts(asked: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"moe.{next(iter(asked))} = .*the model has no experts"):
        ExpertRouting(MoEConfig(**asked), Experts(), ())


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("gpt_oss", "experts of model type 'gpt_oss' also have gate_up_proj_bias, down_proj_bias"),
        ("longcat_flash", "4 experts of model type 'longcat_flash' have no weights"),
    ],
)
def test_experts_that_ranks_cannot_divide_are_refused(family: str, words: str) -> None:
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this release of transformers has no model type {family}")
    experts = GptOssConfig(num_hidden_layers=1, hidden_size=8, intermediate_size=8, num_local_experts=4, vocab_size=64)
    config = experts if family == "gpt_oss" else OUTSIDE_THE_GRID[family]()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match=f"{words}.*leave e out"):
        check_experts(config, model, ParallelDims.parse("fsdp:d1e2"))


def test_dense_layers_with_names_of_experts_are_no_experts() -> None:
    """Linear modules of Phi-3 and Zamba2 have the names of stacked weights."""
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "vocab_size": 8,
    }
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Phi3Config(**sizes, num_key_value_heads=1, pad_token_id=0))
    assert hasattr(model.model.layers[0].mlp, "gate_up_proj")
    assert stacked_experts(model) == []
