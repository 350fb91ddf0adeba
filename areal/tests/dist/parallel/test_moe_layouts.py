"""Mixtures of experts: balancing losses, replay, recording and load, compared with float64 on one process, sequence by sequence."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor

from areal.api import OptimizerConfig, ParallelDims
from areal.engine.moe.balance_loss import AUX_LOSS
from areal.inference.protocol import Completion
from areal.tests.grid.cases import CASES, as_input, dp_shard_indices, rows, samples
from areal.tests.grid.cell_engine import start_cell
from areal.tests.grid.compare import assert_number, assert_rows, assert_tensors
from areal.tests.grid.layouts import Cell, Layout
from areal.tests.grid.losses import OBJECTIVES
from areal.tests.harness.references.moe_reference import (
    SHAPES,
    TOLERANCE,
    assert_terms,
    moe_reference,
    recorded,
    with_replay,
)
from areal.tests.harness.tiny import family_dir, started
from areal.tests.harness.world import world
from areal.trainer.rollout.sequence import Sequence

MOE = {"aux_loss": 0.5, "z_loss": 0.25, "statistics": True}

Layouts = dict[int, tuple[tuple[str, str], ...]]

LAYOUTS: Layouts = {
    1: (("fsdp:d1", ""), ("fsdp:d1", "rows"), ("megatron:d1", "")),
    2: (
        ("fsdp:d2", ""),
        ("fsdp:c2", "ulysses"),
        ("fsdp:c2", "gather_kv"),
        ("fsdp:e2", ""),
        ("fsdp:p2", ""),
        ("megatron:d2", ""),
        ("megatron:t2", ""),
        ("megatron:e2", ""),
        ("megatron:p2", ""),
        ("megatron:p2v2", ""),
        ("megatron:c2", "ulysses"),
        ("megatron:c2", "gather_kv"),
        ("megatron:(attn:d1t2|ffn:d1e2)", ""),
    ),
    4: (
        ("fsdp:d2c2", "gather_kv"),
        ("fsdp:d2e2", ""),
        ("fsdp:e2p2", ""),
        ("megatron:e2t2", ""),
        ("megatron:c2p2", "gather_kv"),
    ),
}


JAX_NAMES = {1: ("jax:d1",), 2: ("jax:d2", "jax:c2", "jax:e2", "jax:t2"), 4: ("jax:d2e2",)}  # without balancing losses
JAX_LAYOUTS: Layouts = {size: tuple((name, "") for name in names) for size, names in JAX_NAMES.items()}


def layout(backend: str, how: str = "", *, moe: dict[str, Any] = MOE) -> Layout:
    """Return a layout of an engine that balances its experts, if it can."""
    engine = ParallelDims.parse(backend).backend
    options: dict[str, Any] = {"moe": {} if engine == "jax" else moe}
    if how:
        options[engine] = {"attention": how} if how == "rows" else {"context_parallel": how}
    return Layout(backend, how, options, changes=CHANGES["four" if "v2" in backend else "two"])


CHANGES: dict[str, dict[str, Any]] = {"two": {}, "four": {"num_hidden_layers": 4}}


def cells(cuts: dict[str, tuple[str, str, str]], *sizes: int, layouts: Layouts = LAYOUTS) -> list[Any]:
    """Return every layout of these world sizes with the splits in turn, marked with its world; one rank gets all splits."""
    params, turn = [], cycle(cuts)
    for size in sizes:
        for backend, how in layouts[size]:
            for name in cuts if size == 1 else [next(turn)]:
                case, cut, options = cuts[name]
                cell = Cell(layout(backend, how), "qwen3_moe", "nll", case, cut, options)
                params.append(pytest.param(cell, id=f"{backend}-{how}-{name}", marks=pytest.mark.world(size)))
    return params


# ---- balancing terms of the loss

CUTS = {
    "whole": ("ragged", "whole", "plain"),
    "cut": ("ragged", "tokens24", "recompute"),
    "fillers": ("starved", "mbs3", "plain"),
    # All sequences of one rank have zero loss weight, but their routers are counted.
    "weightless": ("zero_rank", "tokens24", "plain"),
}


@pytest.mark.parametrize("cell", cells(CUTS, 1, 2, 4))
def test_balancing_losses_are_loss_terms(cell: Cell) -> None:
    call = (cell.objective.loss_fn, cell.objective.weight_fn)
    with start_cell(cell) as run:
        engine, batch, expected = run.engine, run.batch(), moe_reference(cell)
        assert_terms(engine.eval_batch(batch, *call), expected)
        step = engine.forward_backward(batch, *call)
        assert_terms(step, expected)
        assert_tensors(engine.named_gradients(), expected.gradients, TOLERANCE)
        assert_number(engine.optimizer_step().grad_norm, expected.grad_norm, TOLERANCE)
        again = engine.train_batch(batch, *call)
        assert_terms(again, expected)
        assert_number(again.grad_norm, expected.grad_norm, TOLERANCE)
        peaks = expected.load.max(-1).values / expected.load.mean(-1)
        assert step.metrics["moe/load_max_over_mean"] == pytest.approx(peaks.mean().item(), rel=1e-12)
        assert step.metrics["moe/load_max_over_mean_worst"] == pytest.approx(peaks.max().item(), rel=1e-12)
        assert step.metrics["moe/idle_experts"] == (expected.load == 0).sum()


@pytest.mark.parametrize("normalization", ["sum", 8.0])
@pytest.mark.parametrize("cell", cells({"cut": ("ragged", "tokens24", "plain")}, 2)[::3])
def test_balancing_losses_accumulate_over_calls(cell: Cell, normalization: Any) -> None:
    """With sums or a constant divisor, the gradients of partial batches add up to that of the full batch."""
    call = (cell.objective.loss_fn, cell.objective.weight_fn)
    number = 1.0 if normalization == "sum" else normalization
    expected = moe_reference(cell, divide_by=number, loss_weight=0.5)
    with start_cell(cell) as run:
        everything = run.samples()
        terms: dict[str, float] = {}
        for indices in (run.local_indices[:1], run.local_indices[1:]):
            batch = as_input([everything[i] for i in indices], "list")
            step = run.engine.forward_backward(batch, *call, normalization=normalization, loss_weight=0.5)
            terms = {name: terms.get(name, 0.0) + value for name, value in step.terms.items()}
        assert terms == pytest.approx(
            {name: 0.5 * value / number for name, value in expected.loss.items()}, rel=TOLERANCE
        )
        assert_tensors(run.engine.named_gradients(), expected.gradients, TOLERANCE)


@pytest.mark.world(2)
@pytest.mark.parametrize("backend", ["fsdp:d2", "megatron:p2", "megatron:t2"])
def test_pipeline_stage_without_experts(backend: str) -> None:
    plain = layout(backend)
    cell = Cell(
        Layout(backend, "", plain.options, changes={"mlp_only_layers": [0]}), "qwen3_moe", "nll", "ragged", "tokens24"
    )
    call = (cell.objective.loss_fn, cell.objective.weight_fn)
    with start_cell(cell) as run:
        step, expected = run.engine.forward_backward(run.batch(), *call), moe_reference(cell)
        assert_terms(step, expected)
        assert_tensors(run.engine.named_gradients(), expected.gradients, TOLERANCE)


@pytest.mark.world(2)
@pytest.mark.parametrize("backend", ["fsdp:c2", "megatron:p2"])
def test_custom_loop_omits_balancing_terms(backend: str) -> None:
    cell, bare = (Cell(layout(backend, moe=moe), "qwen3_moe", "nll", "ragged", "tokens24") for moe in (MOE, {}))

    def gradients(cell: Cell) -> dict[str, Tensor]:
        with start_cell(cell) as run:
            mbs = run.engine.microbatches(run.batch())
            run.engine.forward_backward_batch(mbs, lambda out, mb: (cell.objective.loss_fn(out, mb.data)[0], None))
            return {name: tensor.clone() for name, tensor in run.engine.named_gradients()}

    actual, expected = gradients(cell), gradients(bare)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


# ---- replay and recording

CUT = {"cut": ("ragged", "tokens24", "plain")}
REPLAY = {**CUT, "again": ("starved", "mbs3", "recompute")}


@pytest.mark.parametrize("cell", [*cells(REPLAY, 1, 2, 4), *cells(REPLAY, 1, 2, 4, layouts=JAX_LAYOUTS)])
def test_recorded_routing_is_replayed(cell: Cell) -> None:
    call = (cell.objective.loss_fn, cell.objective.weight_fn)
    layers = cell.layout.changes.get("num_hidden_layers", 2)
    experts = recorded(cell.case.lengths, layers)
    with start_cell(cell) as run:
        batch, expected = with_replay(run, experts), moe_reference(cell, replay=experts)
        plain = moe_reference(cell)
        assert abs(expected.loss["loss"] - plain.loss["loss"]) > 1e-3, "replay must show"
        lengths = [cell.case.lengths[i] for i in run.local_indices]
        actual = rows(run.engine.forward_batch(batch), lengths)
        assert_rows(actual, expected.logprobs, run.local_indices, TOLERANCE)
        assert_terms(run.engine.forward_backward(batch, *call), expected)
        assert_tensors(run.engine.named_gradients(), expected.gradients, TOLERANCE)


@pytest.mark.parametrize("cell", [*cells(CUT, 1, 2), *cells(CUT, 1, 2, layouts=JAX_LAYOUTS)])
def test_tokens_without_a_record_go_where_the_router_decides(cell: Cell) -> None:
    """Every third token, and the last one of each sequence, as servers leave it out."""
    call = (cell.objective.loss_fn, cell.objective.weight_fn)
    experts = recorded(cell.case.lengths, cell.layout.changes.get("num_hidden_layers", 2))
    for each in experts:
        each[1::3] = each[-1:] = -1
    with start_cell(cell) as run:
        expected = moe_reference(cell, replay=experts, name="gaps")
        assert_terms(run.engine.forward_backward(with_replay(run, experts), *call), expected)
        assert_tensors(run.engine.named_gradients(), expected.gradients, TOLERANCE)


@pytest.mark.world(1)
@pytest.mark.parametrize("backend", ["fsdp:d1", "megatron:d1", "jax:d1"])
def test_experts_of_an_answer_are_replayed(backend: str) -> None:
    """A server returns those of all tokens but the last; with its own experts, an engine has the log-probs of a run without replay."""
    prompt, tokens = [5, 6, 7, 8], (9, 10, 11)
    given = recorded((len(prompt) + len(tokens) - 1,))[0].int()

    def sample(experts: Tensor | None) -> dict[str, Tensor]:
        answer = Completion(tokens, (-1.0,) * 3, (0,) * 3, "stop", routed_experts=experts)
        return Sequence.single(prompt, answer, 1.0).sample()

    with started(backend, path=family_dir("qwen3_moe")) as engine:
        outputs: Any = ("routed_experts", "logprobs")
        own = engine.forward_batch([sample(None)], outputs=outputs)
        other = engine.forward_batch([sample(given)], outputs=outputs)
        again = engine.forward_batch([sample(own["routed_experts"][0][:-1].int())], outputs=outputs)
    assert torch.equal(other["routed_experts"][0][:-1], given.long())
    assert not torch.allclose(other["logprobs"][0], own["logprobs"][0], atol=1e-3)
    assert torch.allclose(again["logprobs"][0], own["logprobs"][0], atol=1e-6)


@pytest.mark.parametrize(
    "cell", [p for p in [*cells(CUT, 1, 2), *cells(CUT, 1, 2, layouts=JAX_LAYOUTS)] if "p2" not in p.id]
)
def test_routing_is_recorded(cell: Cell) -> None:
    with start_cell(cell) as run:
        lengths = [cell.case.lengths[i] for i in run.local_indices]
        actual = run.engine.forward_batch(run.batch(), outputs=("routed_experts", "logprobs"))
        expected = moe_reference(cell)
        for row, i in zip(rows(actual["routed_experts"], lengths), run.local_indices, strict=True):
            assert torch.equal(row, expected.experts[i])
        replayed = recorded(cell.case.lengths)
        again = rows(run.engine.forward_batch(with_replay(run, replayed), outputs=("routed_experts",)), lengths)
        assert all(torch.equal(row, replayed[i]) for row, i in zip(again, run.local_indices, strict=True))


SHARING = [
    ("fsdp:d1", ""),
    ("fsdp:c2", "gather_kv"),
    ("fsdp:e2", ""),
    ("fsdp:p2", ""),
    ("megatron:d1", ""),
    ("megatron:t2", ""),
    ("jax:d1", ""),
    ("jax:c2", ""),
]


@pytest.mark.parametrize(
    ("backend", "how"),
    [pytest.param(*one, marks=pytest.mark.world(ParallelDims.parse(one[0]).world_size)) for one in SHARING],
)
def test_shared_prefix_counts_per_sequence_in_routers(backend: str, how: str) -> None:
    """Check terms, load, replay and recording where sequences share a prefix."""
    cell = Cell(layout(backend, how), "qwen3_moe", "nll", "family", "shared40")
    call = (cell.objective.loss_fn, cell.objective.weight_fn)
    experts = recorded(cell.case.lengths)
    for i, (other, shared) in cell.case.begins_like.items():
        # half of the shared prefix is routed to the same experts too
        experts[i][: shared // 2] = experts[other][: shared // 2]
    with start_cell(cell) as run:
        expected, replayed = moe_reference(cell), moe_reference(cell, replay=experts)
        lengths = [cell.case.lengths[i] for i in run.local_indices]
        step = run.engine.forward_backward(run.batch(), *call)
        assert_terms(step, expected)
        assert_tensors(run.engine.named_gradients(), expected.gradients, TOLERANCE)
        if "jax" not in backend:
            assert step.metrics["moe/idle_experts"] == (expected.load == 0).sum()
        run.engine.zero_grad()

        batch = with_replay(run, experts)
        shared = [mb.tree is not None and len(mb.tree) < mb.n_tokens for mb in run.engine.microbatches(batch).real]
        assert any(shared)
        assert_rows(rows(run.engine.forward_batch(batch), lengths), replayed.logprobs, run.local_indices, TOLERANCE)
        assert_terms(run.engine.forward_backward(batch, *call), replayed)
        assert_tensors(run.engine.named_gradients(), replayed.gradients, TOLERANCE)
        if "p2" not in backend:
            actual = run.engine.forward_batch(run.batch(), outputs=("routed_experts",))
            for row, i in zip(rows(actual, lengths), run.local_indices, strict=True):
                assert torch.equal(row, expected.experts[i])


SIGMOID = ["fsdp:d1", "fsdp:e2", "fsdp:p2", "megatron:d1", "megatron:e2"]


@pytest.mark.parametrize(
    "backend", [pytest.param(b, marks=pytest.mark.world(ParallelDims.parse(b).world_size)) for b in SIGMOID]
)
def test_deepseek_routers_are_recorded(backend: str) -> None:
    """Check sigmoid scores, groups of experts and a bias for the choice: terms, replay and recording."""
    cell = Cell(layout(backend), "deepseek_v3", "nll", "ragged", "tokens24")
    call = (cell.objective.loss_fn, cell.objective.weight_fn)
    experts = recorded(cell.case.lengths, *SHAPES["deepseek_v3"])
    with start_cell(cell) as run:
        expected, lengths = moe_reference(cell), [cell.case.lengths[i] for i in run.local_indices]
        step = run.engine.forward_backward(run.batch(), *call)
        assert_terms(step, expected)
        assert_tensors(run.engine.named_gradients(), expected.gradients, TOLERANCE)
        assert step.metrics["moe/idle_experts"] == (expected.load == 0).sum()
        run.engine.zero_grad()

        replayed = moe_reference(cell, replay=experts)
        assert abs(replayed.loss["loss"] - expected.loss["loss"]) > 1e-3, "replay must show"
        assert_terms(run.engine.forward_backward(with_replay(run, experts), *call), replayed)
        assert_tensors(run.engine.named_gradients(), replayed.gradients, TOLERANCE)
        if "p2" not in backend:
            actual = run.engine.forward_batch(run.batch(), outputs=("routed_experts",))
            for row, i in zip(rows(actual, lengths), run.local_indices, strict=True):
                assert torch.equal(row.sort(-1).values, expected.experts[i].sort(-1).values)


@pytest.mark.world(2)
def test_recording_with_pipeline_raises() -> None:
    cell = Cell(layout("megatron:p2"), "qwen3_moe")
    with start_cell(cell) as run:
        with pytest.raises(ValueError, match="layout without 'p'"):
            run.engine.forward_batch(run.batch(), outputs=("routed_experts",))
        mbs = run.engine.microbatches(run.batch())
        with pytest.raises(ValueError, match="layout without 'p'"):
            run.engine.forward_backward_batch(
                mbs, lambda out, mb: (None, None), outputs=("routed_experts",), forward_only=True
            )


# ---- errors

WRONG = {
    "too high": (lambda x: x.index_fill(0, torch.tensor([0]), 9), r"ids from 0 to 9"),
    "negative": (lambda x: x - 2, r"ids from -2"),
    "half a record": (
        lambda x: torch.cat([x[..., :1] * 0 - 1, x[..., 1:]], -1),
        r"ids from -1 .* and -1 for all of a token",
    ),
    "one layer": (lambda x: x[:, :1], r"is \[B, S, 1, 2\]: pass \[B, S, 2, 2\]"),
    "one expert": (lambda x: x[:, :, :1], r"pass \[B, S, 2, 2\]"),
    "floats": (lambda x: x.double(), "expert ids are integers"),
    "twice": (lambda x: x * 0 + 1, "twice to the same expert"),
}


@pytest.mark.world(2)
@pytest.mark.parametrize("engine", ["fsdp", "megatron", "jax"])
@pytest.mark.parametrize("wrong", WRONG)
def test_invalid_replay_raises_on_every_rank(engine: str, wrong: str) -> None:
    change, message = WRONG[wrong]
    case = CASES["ragged"]
    with started(f"{engine}:d{world().size}", path=family_dir("qwen3_moe")) as run:
        indices = dp_shard_indices(case, run.dp_rank, run.dp_size)
        experts, batch = recorded(case.lengths), samples(case)
        broken = run.dp_rank == run.dp_size - 1
        passed = [{**batch[i], "routed_experts": change(experts[i]) if broken else experts[i]} for i in indices]
        with pytest.raises(ValueError, match=message):
            run.forward_batch(passed)
        good = [{**batch[i], "routed_experts": experts[i]} for i in indices]
        assert len(run.forward_batch(good)) == len(indices)


@pytest.mark.world(1)
@pytest.mark.parametrize("backend", ["fsdp:d1", "megatron:d1"])
def test_moe_options_raise_for_a_dense_model(backend: str) -> None:
    with pytest.raises(ValueError, match=r"moe\.z_loss = 0\.1, but"), started(backend, moe={"z_loss": 0.1}):
        raise RuntimeError("not reached")
    with started(backend) as engine:
        batch = samples(CASES["ragged"])
        with pytest.raises(ValueError, match="leave it out"):
            engine.forward_batch(
                [{**x, "routed_experts": torch.zeros(len(x["input_ids"]), 2, 2).long()} for x in batch]
            )
        with pytest.raises(ValueError, match="leave it out"):
            engine.forward_batch(batch, outputs=("routed_experts",))


@pytest.mark.world(1)
def test_loss_with_name_of_a_balancing_term_raises() -> None:
    with (
        started("fsdp:d1", path=family_dir("qwen3_moe"), moe={"aux_loss": 0.1}) as engine,
        pytest.raises(ValueError, match="give it another name"),
    ):
        engine.eval_batch(
            samples(CASES["ragged"]),
            lambda out, batch: {AUX_LOSS: out.logprobs.sum()},
            lambda batch: {AUX_LOSS: batch["loss_mask"].sum()},
        )


@pytest.mark.world(2)
@pytest.mark.parametrize("backend", ["fsdp:d2", "megatron:p2"])
def test_training_balances_the_load(backend: str) -> None:
    adam = OptimizerConfig(lr=0.02, gradient_clipping=None)
    moe = {"aux_loss": 4.0, "statistics": True}
    with started(backend, path=family_dir("qwen3_moe"), moe=moe, optimizer=adam) as engine:
        batch, objective = samples(CASES["ragged"]), OBJECTIVES["nll"]
        local = batch[engine.dp_rank :: engine.dp_size]
        steps = [engine.train_batch(local, objective.loss_fn, objective.weight_fn) for _ in range(12)]
        assert steps[-1].terms[AUX_LOSS] < steps[0].terms[AUX_LOSS]
