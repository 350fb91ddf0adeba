"""Megatron engine: gradient reduction, layer split, refused settings, and global state."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from areal.api import FinetuneSpec
from areal.api.sections.megatron import MegatronConfig
from areal.engine.registry import create_engine
from areal.tests.dist.megatron.begun import begun_reductions
from areal.tests.grid.cell_engine import ZERO_LR, start_cell
from areal.tests.grid.compare import assert_number, assert_step, assert_tensors
from areal.tests.grid.layouts import Cell, Layout, all_layouts
from areal.tests.harness.tiny import config, global_batch, local_batch, loss, started

pytest.importorskip("megatron.core")

PLAIN = {"overlap_grad_reduce": False}
OVERLAP = {"overlap_param_gather": True, "bucket_size": 1000}


def cell(backend: str, *, family: str = "qwen3", dtype: str = "float32", changes: Any = None, **options: Any) -> Cell:
    layout = Layout(backend, options={"megatron": options}, changes=changes or {})
    return Cell(layout, family, cut="tokens24", dtype=dtype)


@pytest.mark.world(2, 4)
@pytest.mark.parametrize("overlap", [PLAIN, OVERLAP], ids=["plain", "overlap"])
def test_megatron_reduces_gradients_once_per_step(overlap: dict[str, Any], world_size: int) -> None:
    backend = {2: "megatron:d2", 4: "megatron:d2p2"}[world_size]
    with start_cell(cell(backend, **overlap)) as run, begun_reductions() as begun:
        engine, batch = run.engine, run.batch()
        call = (run.cell.objective.loss_fn, run.cell.objective.weight_fn)
        expected, _ = run.expected()
        buckets = sum(
            len(chunk.bucket_groups) + len(chunk.expert_parallel_bucket_groups) for chunk in engine._components.model
        )
        assert buckets > 1 if overlap is OVERLAP and world_size == 2 else buckets >= 1
        for _ in range(3):  # from the second round the parameters to wait for are known
            for _ in range(3):
                engine.forward_backward(batch, *call, loss_weight=1 / 3)
            assert len(begun) == 0, "a call reduced, although more could follow"
            assert_number(engine.optimizer_step().grad_norm, expected.grad_norm, run.cell.tolerance)
            assert len(begun) == buckets
            del begun[:]
            assert_number(engine.train_batch(batch, *call).grad_norm, expected.grad_norm, run.cell.tolerance)
            assert len(begun) == buckets
            del begun[:]


@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("backend", "options", "starts"),
    [
        ("megatron:d2", PLAIN, False),
        ("megatron:d2", OVERLAP, True),
        ("megatron:c2", {}, True),
    ],
    ids=["d2-off", "d2", "c2"],
)
def test_reduction_starts_in_the_backward_unless_it_is_off(
    backend: str, options: dict[str, Any], starts: bool, world_size: int
) -> None:
    with start_cell(cell(backend, **options)) as run, begun_reductions() as begun:
        call = (run.cell.objective.loss_fn, run.cell.objective.weight_fn)
        run.engine.train_batch(run.batch(), *call)
        seen = []
        finalize = run.engine._gradients.finalize
        run.engine._gradients.finalize = lambda: (seen.append(len(begun)), finalize())
        del begun[:]
        run.engine.train_batch(run.batch(), *call)
        assert (seen[0] > 0) == starts, "reduced before the step"
        assert len(begun) == seen[0] or not starts, "the rest was reduced at the step"


@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("backend", "options"),
    [("megatron:d2", PLAIN), ("megatron:d2", OVERLAP), ("megatron:t2", {}), ("megatron:p2", {})],
    ids=["d2", "d2-overlap", "t2", "p2"],
)
def test_reading_gradients_between_calls_changes_nothing(
    backend: str, options: dict[str, Any], world_size: int
) -> None:
    with start_cell(cell(backend, family="qwen3_tied", **options)) as run:
        engine, batch = run.engine, run.batch()
        call = (run.cell.objective.loss_fn, run.cell.objective.weight_fn)
        expected, _ = run.expected()
        for calls in (1, 2, 3):
            engine.forward_backward(batch, *call)
            seen = ((name, tensor / calls) for name, tensor in engine.named_gradients())
            assert_tensors(seen, expected.gradients, run.cell.gradient_tolerance)
        assert_number(engine.optimizer_step().grad_norm / 3, expected.grad_norm, run.cell.tolerance)


@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("options", "layers"),
    [
        ({"first_stage_layers": 1}, 3),
        ({"last_stage_layers": 1}, 4),
        ({"first_stage_layers": 3, "last_stage_layers": 2}, 5),
    ],
    ids=["1+2", "3+1", "3+2"],
)
def test_pipeline_stages_of_unequal_depth(options: dict[str, int], layers: int, world_size: int) -> None:
    with start_cell(cell("megatron:p2", dtype="float64", changes={"num_hidden_layers": layers}, **options)) as run:
        call = (run.cell.objective.loss_fn, run.cell.objective.weight_fn)
        expected, _ = run.expected()
        depths = [len(chunk.module.decoder.layers) for chunk in run.engine._components.model]
        first = options.get("first_stage_layers", layers - options.get("last_stage_layers", 0))
        assert depths == [first if run.engine.mesh["pp"].get_local_rank() == 0 else layers - first]
        assert_step(run.engine.forward_backward(run.batch(), *call), expected, run.cell.tolerance)
        assert_tensors(run.engine.named_gradients(), expected.gradients, run.cell.tolerance)


@pytest.mark.world(1, 2)
def test_megatron_sliding_windows(world_size: int) -> None:
    windows = {
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 1,
        "layer_types": ["full_attention", "sliding_attention"],
    }
    backend = {1: "megatron:d1", 2: "megatron:c2"}[world_size]
    with start_cell(cell(backend, family="qwen2", dtype="float64", changes=windows)) as run:
        call = (run.cell.objective.loss_fn, run.cell.objective.weight_fn)
        expected, _ = run.expected()
        assert_step(run.engine.forward_backward(run.batch(), *call), expected, run.cell.tolerance)
        assert_tensors(run.engine.named_gradients(), expected.gradients, run.cell.tolerance)


@pytest.mark.world(1)
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"sliding_window": 4}, id="window"),
        pytest.param(
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}, id="rotary"
        ),
    ],
)
def test_megatron_ignores_what_the_family_ignores(changes: dict[str, Any]) -> None:
    """Llama has neither a window nor parts of heads that are not rotated."""
    with start_cell(cell("megatron:d1", family="llama", dtype="float64", changes=changes)) as run:
        call = (run.cell.objective.loss_fn, run.cell.objective.weight_fn)
        expected, _ = run.expected()
        assert_step(run.engine.forward_backward(run.batch(), *call), expected, run.cell.tolerance)
        assert_tensors(run.engine.named_gradients(), expected.gradients, run.cell.tolerance)


@pytest.mark.world(1)
@pytest.mark.parametrize(
    ("backend", "changes", "said"),
    [
        ("megatron:d1", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("megatron:d1", {"attention_dropout": 0.1}, "attention_dropout = 0.1"),
        ("megatron:d1", {"attention_bias": True}, "attention_bias = True"),
        ("megatron:d1", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
    ],
)
def test_unsupported_model_configurations_raise(
    backend: str, changes: dict[str, Any], said: str, world_size: int
) -> None:
    made = cell(backend, family="llama", changes=changes)
    engine = create_engine(made.config(ZERO_LR))
    with pytest.raises(ValueError, match=said):
        engine.initialize(FinetuneSpec(total_train_steps=1))
    engine.destroy()


@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("backend", "family", "options", "said"),
    [
        ("megatron:t2", "smollm", {}, "9 query heads"),
        ("megatron:e2", "qwen3", {}, "0 experts"),
        ("megatron:p2v2", "qwen3", {}, "2 layers do not split"),
        ("megatron:p2", "qwen3", {"first_stage_layers": 2}, "do not split"),
        ("megatron:t2", "qwen3_moe", {"sequence_parallel": False}, "sequence_parallel"),
        ("megatron:d2", "gemma3_text", {}, "gemma3_text"),
        ("megatron:d2", "qwen3", {"first_stage_layers": 1}, "no pipeline"),
    ],
)
def test_layouts_unsupported_by_model_raise_on_every_rank(
    backend: str, family: str, options: dict[str, Any], said: str, world_size: int
) -> None:
    engine = create_engine(cell(backend, family=family, **options).config(ZERO_LR))
    with pytest.raises(ValueError, match=said):
        engine.initialize(FinetuneSpec(total_train_steps=1))
    engine.destroy()


@pytest.mark.world(1)
def test_unsupported_recomputation_raises() -> None:
    with (
        create_engine(config("megatron:d1", activation_checkpointing="selective")) as engine,
        pytest.raises(ValueError, match="'selective': the Megatron engine has 'none' and 'full'"),
    ):
        engine.initialize(FinetuneSpec(total_train_steps=1))


def test_overlapped_gather_requires_overlapped_reduction() -> None:
    with pytest.raises(ValueError, match="overlap_param_gather = True needs"):
        MegatronConfig(overlap_grad_reduce=False, overlap_param_gather=True)


@pytest.mark.world(2)
def test_interleaved_stages_communicate_in_the_groups_of_the_engine() -> None:
    """An engine that ends by a fault aborts its own groups: in the default group, a rank would wait for a peer that has failed."""
    layout = next(layout for layout in all_layouts() if layout.name == "megatron:p2v2")
    point = Cell(layout, cut="tokens24", dtype="float32")
    with start_cell(point) as run:
        engine, objective = run.engine, point.objective
        # Both modules, because a batched operation must be one of the functions in the second.
        with contextlib.ExitStack() as stack:
            spies = [mock.Mock(side_effect=getattr(dist, name)) for name in ("isend", "irecv")]
            for module in (dist, dist.distributed_c10d):
                stack.enter_context(mock.patch.multiple(module, isend=spies[0], irecv=spies[1]))
            engine.train_batch(run.batch(), objective.loss_fn, objective.weight_fn)
        groups = [
            next(value for value in (*call.args, *call.kwargs.values()) if isinstance(value, dist.ProcessGroup))
            for spy in spies
            for call in spy.call_args_list
        ]
        assert len(groups) > 4
        # The control plane carries the header of the results, and is aborted with them.
        assert set(groups) <= {*engine._groups._groups, *engine.control._groups._groups}


@pytest.mark.world(2)
def test_two_layouts_alternate_in_one_world(world_size: int) -> None:
    """Train each engine with steps of the other in between: each trains as it does alone."""
    from megatron.core import parallel_state

    def alone(backend: str) -> list[float]:
        with started(backend) as engine:
            return [engine.train_batch(local_batch(engine, global_batch(seed)), loss).loss for seed in range(3)]

    expected = {backend: alone(backend) for backend in ("megatron:p2", "megatron:d2", "fsdp:d2")}
    engines = {backend: create_engine(config(backend)) for backend in expected}
    for engine in engines.values():
        engine.initialize(FinetuneSpec(total_train_steps=1000))
    actual: dict[str, list[float]] = {backend: [] for backend in expected}
    for seed in range(3):
        for backend, engine in engines.items():
            actual[backend].append(engine.train_batch(local_batch(engine, global_batch(seed)), loss).loss)
    for engine in engines.values():
        engine.destroy()
    assert actual == expected
    assert not parallel_state.model_parallel_is_initialized()


@pytest.mark.world(1)
def test_cpu_patch_raises_if_cuda_is_available(world_size: int) -> None:
    from areal.engine.megatron import cpu

    with (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        pytest.raises(RuntimeError, match="CUDA is available"),
    ):
        cpu.install()


@pytest.mark.world(1)
def test_cpu_patch_is_visible_only_to_megatron(world_size: int) -> None:
    with started("megatron:d1"):
        assert torch.zeros(1).type() == "torch.FloatTensor"
        with FakeTensorMode():
            assert torch.zeros(1, device="cuda").is_cuda
        with torch.device("meta"):
            assert torch.empty(1).is_meta
