"""Expert parallelism on the FSDP engine: properties that the grid does not test."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from areal.api import FinetuneSpec, SaveLoadMeta
from areal.engine.fsdp.expert_parallel import Dispatch
from areal.engine.model.stacked_experts import stacked_experts
from areal.engine.registry import create_engine
from areal.tests.grid.cases import rows
from areal.tests.grid.cell_engine import start_cell
from areal.tests.grid.compare import assert_number, assert_rows, assert_step, assert_tensors
from areal.tests.grid.layouts import Cell, Layout
from areal.tests.grid.models import model_dir
from areal.tests.harness.references.moe_reference import SHAPES, TOLERANCE, moe_reference, recorded, with_replay
from areal.tests.harness.resume_chain import assert_resumes
from areal.tests.harness.tiny import config, family_dir, global_batch, local_batch, loss, same_bits, started, weights_of
from areal.utils.dtensor import local_shard

UNEVEN = {"n_routed_experts": 7, "n_group": 1}
FOUR = [pytest.mark.world(4)]
BACKENDS = [
    pytest.param("fsdp:e2", id="e2", marks=pytest.mark.world(2)),
    pytest.param("fsdp:(attn:c2|ffn:e2)", id="attn:c2|ffn:e2", marks=pytest.mark.world(2)),
    pytest.param("fsdp:d2e2", id="d2e2", marks=FOUR),
    pytest.param("fsdp:e4", id="e4", marks=FOUR),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_expert_shards_load_stream_and_save(backend: str, family: str, tmp_path: Path) -> None:
    path = model_dir(family)
    on_disk = load_file(Path(path) / "model.safetensors")
    with started(backend, path=path) as engine:
        assert same_bits(weights_of(engine), on_disk)
        engine.save(SaveLoadMeta(tmp_path / "saved"))
        assert same_bits(load_file(tmp_path / "saved" / "model.safetensors"), on_disk)
        layers, number = SHAPES[family]
        result: Any = stacked_experts(engine._components.model)
        assert len(result) == layers
        for experts in result:
            assert experts.num_experts * engine.dims.ep == number
            local, box = local_shard(experts.gate_up_proj)
            assert box[0].stop - box[0].start == experts.num_experts
            assert local.numel() * dist.get_world_size() == experts.gate_up_proj.numel()


@pytest.mark.parametrize("backend", BACKENDS)
def test_expert_parallel_rank_without_tokens(backend: str) -> None:
    """All tokens are routed to the first two experts: the last rank computes nothing but joins the collectives."""
    options = {"activation_checkpointing": "full", "moe": {"aux_loss": 0.5, "z_loss": 0.25}}
    cell = Cell(Layout(backend, options=options), "qwen3_moe", "nll", "ragged", "tokens24")
    call = (cell.objective.loss_fn, cell.objective.weight_fn)
    everything = [x * 0 + torch.tensor([1, 0]) for x in recorded(cell.case.lengths)]
    with start_cell(cell) as run:
        expected = moe_reference(cell, replay=everything, name="first two")
        batch, lengths = with_replay(run, everything), [cell.case.lengths[i] for i in run.local_indices]
        assert_rows(rows(run.engine.forward_batch(batch), lengths), expected.logprobs, run.local_indices, TOLERANCE)
        run.engine.forward_backward(batch, *call)
        gradients = dict(run.engine.named_gradients())
        assert_tensors(gradients.items(), expected.gradients, TOLERANCE)
        assert not gradients["model.layers.0.mlp.experts.3.down_proj.weight"].any()
        assert gradients["model.layers.0.mlp.experts.1.down_proj.weight"].any()


@pytest.mark.world(2)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(("family", "changes"), [("qwen3_moe", {"num_experts": 3}), ("deepseek_v3", UNEVEN)])
def test_uneven_experts_agree_with_the_reference(
    family: str, changes: dict[str, Any], dtype: str, tmp_path: Path
) -> None:
    """The second rank has fewer experts. In float32 the experts run as grouped matrix products."""
    cell = Cell(Layout("fsdp:e2", changes=changes), family, "nll", "ragged", "tokens24", dtype=dtype)
    call = (cell.objective.loss_fn, cell.objective.weight_fn)
    with start_cell(cell) as run:
        experts = stacked_experts(run.engine._components.model)
        assert {len(x.gate_up_proj.to_local()) for x in experts} == {(2, 4)[family == "deepseek_v3"] - dist.get_rank()}
        expected, outputs = run.expected()
        lengths = [cell.case.lengths[i] for i in run.local_indices]
        assert_rows(
            rows(run.engine.forward_batch(run.batch()), lengths), outputs["logprobs"], run.local_indices, cell.tolerance
        )
        assert_step(run.engine.forward_backward(run.batch(), *call), expected, cell.tolerance)
        assert_tensors(run.engine.named_gradients(), expected.gradients, cell.gradient_tolerance)
        assert_number(run.engine.optimizer_step().grad_norm, expected.grad_norm, cell.tolerance)
        run.engine.save(SaveLoadMeta(tmp_path / "saved"))
        on_disk = load_file(Path(cell.path) / "model.safetensors")
        assert_tensors(load_file(tmp_path / "saved" / "model.safetensors").items(), on_disk, 0.0)


@pytest.mark.parametrize("backend", BACKENDS[:1])
def test_selective_checkpointing_keeps_exchanged_rows(backend: str) -> None:
    exchanges, losses, plans = [], [], []
    for how in ("none", "selective", "full"):
        with started(backend, path=model_dir("qwen3_moe"), activation_checkpointing=how) as engine:
            with (
                mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as exchange,
                mock.patch.object(Dispatch, "of", wraps=Dispatch.of) as planned,
            ):
                step = engine.train_batch(local_batch(engine, global_batch()), loss)
            exchanges.append(exchange.call_count)
            plans.append(planned.call_count)
            losses.append((step.loss, step.grad_norm))
    assert exchanges[0] == exchanges[1] < exchanges[2]
    assert plans[0] == plans[1] == plans[2] > 0, "a recomputation exchanges rows as its forward did"
    assert losses[0] == losses[1] == losses[2]


@pytest.mark.parametrize(
    "chain",
    [
        pytest.param(["e2", "c2", "e2"], marks=pytest.mark.world(2)),
        pytest.param(["c2", "(attn:c2|ffn:e2)", "p2", "e2"], marks=pytest.mark.world(2)),
        pytest.param(["d2e2", "e2p2", "r2e2", "e4"], marks=FOUR),
    ],
)
def test_checkpoint_resumes_in_another_layout(chain: list[str], tmp_path: Path) -> None:
    assert_resumes(model_dir("qwen3_moe"), chain, tmp_path, bound=5e-3)


@pytest.mark.world(2)
def test_checkpoint_of_uneven_experts_resumes_in_another_layout(tmp_path: Path) -> None:
    assert_resumes(model_dir("qwen3_moe", num_experts=3), ["e2", "c2", "e2"], tmp_path, bound=5e-3)


@pytest.mark.world(2)
def test_random_weights_do_not_depend_on_layout() -> None:
    with started("fsdp:e2", init_from_scratch=True, seed=3, path=model_dir("qwen3_moe")) as engine:
        result = weights_of(engine)
    with started("fsdp:d2", init_from_scratch=True, seed=3, path=model_dir("qwen3_moe")) as engine:
        assert same_bits(weights_of(engine), result)


@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("backend", "family", "changes", "message"),
    [
        ("fsdp:e2", "qwen3", {}, "'qwen3' has no stacked experts.*leave e out"),
        (
            "fsdp:e2",
            "qwen3_moe",
            {"num_experts": 1, "num_experts_per_tok": 1},
            "1 experts .* leave a rank of e2 without any",
        ),
        ("fsdp:(attn:t2|ffn:e2)", "qwen3_moe", {}, "no tensor-parallel plan"),
    ],
)
def test_indivisible_experts_raise_on_every_rank(
    backend: str, family: str, changes: dict[str, Any], message: str
) -> None:
    engine = create_engine(config(backend, path=model_dir(family, **changes)))
    with engine, pytest.raises(ValueError, match=message):
        engine.initialize(FinetuneSpec(total_train_steps=1))


class Gathers(TorchDispatchMode):
    """Number of gathers so far."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.name().startswith("c10d::_allgather_base_")
        return func(*args, **(kwargs or {}))


@pytest.mark.world(2)
def test_weights_of_the_next_layer_are_gathered_before_a_layer_computes() -> None:
    issued: list[int] = []
    with started("fsdp:e2", path=model_dir("qwen3_moe")) as engine:
        batch = local_batch(engine, global_batch())
        engine.forward_batch(batch)
        with Gathers() as gathers:
            for experts in stacked_experts(engine._components.model):
                experts.register_forward_pre_hook(lambda *_: issued.append(gathers.count), prepend=True)
            engine.forward_batch(batch)
    # The gathers that were issued when the experts of a layer begin: those of the second layer are among those of the first.
    assert issued[0] > 0
    assert issued[0::2] == issued[1::2]


@pytest.mark.world(2)
def test_a_forward_of_images_gathers_each_layer_once() -> None:
    """Nothing is gathered ahead that the forward does not run: its tower runs before the decoder."""
    batch = [{"input_ids": torch.arange(3, 9)}]
    with started("fsdp:e2", path=family_dir("qwen3_5_moe")) as engine:
        model = engine._components.model
        # Experts at e2 are on one rank, without a gather.
        gathered = sum(isinstance(x, FSDPModule) for x in model.modules()) - len(stacked_experts(model))
        engine.forward_batch(batch)
        with Gathers() as gathers:
            engine.forward_batch(batch)
    assert gathers.count == gathered
