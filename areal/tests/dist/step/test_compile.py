"""Compiled layers: number of compiled graphs, their reuse across lengths, and equal results."""

from __future__ import annotations

import gc
import random
import shutil
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.utils import counters

from areal.api import MicroBatchSpec
from areal.engine.fsdp.compile import compile_layers
from areal.engine.registry import create_engine
from areal.tests.grid.cell_engine import ZERO_LR
from areal.tests.grid.layouts import LORA
from areal.tests.grid.models import VOCAB, model_dir
from areal.tests.harness.tiny import Sample, config, local_batch, loss, started
from areal.utils.releases import installed_release

LAYERS = 9
"""More than the graphs that dynamo keeps per function: with one graph per layer, dynamo would stop compiling."""

MOST = 2 if installed_release("torch") >= (2, 13) else 8
"""Graphs that 6 random lengths may add, after two lengths have been seen. An older torch traces a layer again for a third and a fifth."""


@contextmanager
def counted() -> Iterator[Any]:
    """Yield a function that returns the number of graphs compiled since its last call.

    Raise where dynamo would stop compiling.
    """
    known = 0

    def new() -> int:
        nonlocal known
        before, known = known, counters["stats"]["unique_graphs"]
        return known - before

    torch._dynamo.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        new()
        yield new
    torch._dynamo.reset()


def batch(rng: random.Random, ranks: int) -> list[Sample]:
    """Return two to nine sequences of 2 to 30 tokens for each rank."""
    lengths = [rng.randint(2, 30) for _ in range(ranks * rng.randint(2, 9))]
    return [
        {
            "input_ids": torch.tensor([rng.randrange(VOCAB) for _ in range(length)]),
            "loss_mask": torch.ones(length),
            "advantages": torch.tensor([rng.uniform(-1, 1) for _ in range(length)]),
        }
        for length in lengths
    ]


ONE = [pytest.mark.world(1)]


@pytest.mark.parametrize(
    ("backend", "family", "compiler", "changes"),
    [
        pytest.param("fsdp:d1", "qwen3", "aot_eager", {}, id="plain", marks=pytest.mark.world(1)),
        pytest.param(
            "fsdp:d1",
            "qwen3",
            "inductor",
            {},
            id="inductor",
            marks=[pytest.mark.world(1, timeout=400)],
        ),
        pytest.param("fsdp:d1", "qwen3_moe", "aot_eager", {}, id="experts", marks=ONE),
        pytest.param("fsdp:d1", "qwen3", "aot_eager", {"fsdp": {"attention": "rows"}}, id="rows", marks=ONE),
        pytest.param(
            "fsdp:d1",
            "qwen3",
            "aot_eager",
            {"activation_checkpointing": "selective", "fsdp": {"checkpointed_share": 0.5}},
            id="selective",
            marks=ONE,
        ),
        pytest.param(
            "fsdp:d1",
            "qwen3",
            "aot_eager",
            {"lora": LORA, "activation_checkpointing": "full"},
            id="lora",
            marks=ONE,
        ),
    ],
)
def test_compiled_graphs_are_reused_for_many_lengths(
    backend: str, family: str, compiler: str, changes: dict[str, Any]
) -> None:
    if compiler == "inductor" and not any(map(shutil.which, ("g++", "clang++"))):
        pytest.skip("there is no C++ compiler, which inductor needs on the CPU")
    given = {
        "path": model_dir(family, num_hidden_layers=LAYERS),
        "mb_spec": MicroBatchSpec(),
        "optimizer": ZERO_LR,
        **changes,
    }
    compiled = {**given, "fsdp": {**changes.get("fsdp", {}), "compile": True, "compile_backend": compiler}}
    rng, actual = random.Random(0), []
    with counted() as new, started(backend, **given) as plain, started(backend, **compiled) as engine:
        for turn in range(8):
            everything = batch(rng, engine.dp_size)
            step, expected = (each.train_batch(local_batch(each, everything), loss) for each in (engine, plain))
            assert step.loss == pytest.approx(expected.loss, rel=2e-5, abs=2e-5), turn
            assert step.grad_norm == pytest.approx(expected.grad_norm, rel=2e-4), turn
            value, expected = (each.eval_batch(local_batch(each, everything), loss) for each in (engine, plain))
            assert value.loss == pytest.approx(expected.loss, rel=2e-5, abs=2e-5), turn
            actual.append(new())
    # Layers that are recomputed have graphs of their own.
    kinds = 2 if "checkpointed_share" in changes.get("fsdp", {}) else 1
    assert 0 < sum(actual[:2]) < 2 * LAYERS * kinds
    assert sum(actual[2:]) <= MOST


# ---- one layer


class Layer(nn.Module):
    """Layer without attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.RMSNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))


def test_many_layer_shapes_do_not_exceed_the_graph_limit() -> None:
    with counted() as new:
        for width in range(4, 16):
            layers = [Layer(width) for _ in range(3)]
            compile_layers(layers, "eager")
            x = torch.rand(1, 5, width, requires_grad=True)
            for layer in layers:
                x = layer(x)
            assert new() == 1


def test_compiled_layer_is_freed() -> None:
    layer = Layer(4)
    compile_layers([layer], "aot_eager")
    layer(torch.rand(1, 5, 4, requires_grad=True)).sum().backward()
    weight = weakref.ref(layer.linear.weight)
    del layer
    gc.collect()
    assert weight() is None


# ---- refused configurations


@pytest.mark.parametrize(
    ("backend", "changes", "message"),
    [
        (
            "fsdp:p2v2",
            {"fsdp": {"pipeline_schedule": "ZBVZeroBubble"}},
            "'ZBVZeroBubble'.*fsdp.compile = True needs another schedule",
        ),
        (
            "fsdp:d1",
            {"fsdp": {"compile_backend": "nvcc"}},
            "compile_backend = 'nvcc': choose one of .*aot_eager.*inductor",
        ),
    ],
)
def test_unsupported_compile_options_raise_at_creation(backend: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        create_engine(
            config(backend, path="nowhere", **{**changes, "fsdp": {**changes.get("fsdp", {}), "compile": True}})
        )
