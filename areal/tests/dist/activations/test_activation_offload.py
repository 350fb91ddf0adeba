"""Activation offload: the same bits as without it in every layout, and the bytes that it moves and keeps.

Copies happen as late as the waits allow (:mod:`areal.tests.unit.gpu.lazy_copies`), so that a tensor that is read too early is garbage.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from areal.api import MicroBatchSpec, ParallelDims, StepOutput, TrainEngine
from areal.tests.grid.cases import CASES, samples
from areal.tests.grid.layouts import LORA
from areal.tests.grid.models import VOCAB, model_dir
from areal.tests.harness.tiny import (
    Sample,
    global_batch,
    gradients_of,
    local_batch,
    loss,
    same_bits,
    started,
)
from areal.tests.unit.gpu.lazy_copies import lazily

PAGE = Path(__file__).parents[4] / "docs" / "activation-offload.md"
DEEP = {"num_hidden_layers": 4}
FULL, SELECTIVE = {"activation_checkpointing": "full"}, {"activation_checkpointing": "selective"}


@dataclass(frozen=True)
class Case:
    """An engine.

    Attributes:
        options: of the engine.
        fsdp: of its section.
    """

    name: str
    backend: str = "fsdp:d1"
    family: str = "qwen3"
    options: dict[str, Any] = field(default_factory=dict)
    fsdp: dict[str, Any] = field(default_factory=dict)


def scheduled(schedule: str, layout: str = "p2v2", **options: Any) -> Case:
    return Case(
        f"{schedule}{'-' + options['activation_checkpointing'] if options else ''}",
        f"fsdp:{layout}",
        options=options,
        fsdp={"pipeline_schedule": schedule},
    )


CASES_OF_LAYOUTS = (
    Case("none"),
    Case("selective", options=SELECTIVE),
    Case("full", options=FULL),
    Case("half", options=FULL, fsdp={"checkpointed_share": 0.5}),
    Case("bfloat16", options={"dtype": "bfloat16", **SELECTIVE}),
    Case("rows", fsdp={"attention": "rows"}),
    Case("cpu_offload", fsdp={"cpu_offload": True}),
    Case("lora", options={"lora": LORA}),
    Case("lora-full", options={"lora": LORA, **FULL}),
    Case("shared", options={"mb_spec": MicroBatchSpec(max_tokens_per_mb=64, share_prefixes=True)}),
    Case("compiled", fsdp={"compile": True, "compile_backend": "aot_eager"}),
    Case("compiled-selective", options=SELECTIVE, fsdp={"compile": True, "compile_backend": "aot_eager"}),
    Case("compiled-full", options=FULL, fsdp={"compile": True, "compile_backend": "aot_eager"}),
    Case("experts", family="qwen3_moe"),
    Case("experts-selective", family="qwen3_moe", options=SELECTIVE),
    Case("hybrid", family="qwen3_next"),
    Case("hybrid-selective", family="qwen3_next", options=SELECTIVE),
    Case("hybrid-full", family="bamba", options=FULL),
    Case("d2", "fsdp:d2"),
    Case("d2-full", "fsdp:d2", options=FULL),
    Case("r2", "fsdp:r2", options=SELECTIVE),
    Case("ulysses", "fsdp:c2", fsdp={"context_parallel": "ulysses"}),
    Case("gather_kv", "fsdp:c2", fsdp={"context_parallel": "gather_kv"}),
    Case("c2-hybrid", "fsdp:c2", family="qwen3_next"),
    Case("t2", "fsdp:t2"),
    Case("t2-selective", "fsdp:t2", options=SELECTIVE),
    Case("t2-lora", "fsdp:t2", options={"lora": LORA, **FULL}),
    Case("e2", "fsdp:e2", family="qwen3_moe"),
    Case("e2-selective", "fsdp:e2", family="qwen3_moe", options=SELECTIVE),
    Case("e2-full", "fsdp:e2", family="qwen3_moe", options=FULL),
    scheduled("GPipe", "p2"),
    scheduled("1F1B", "p2"),
    scheduled("Interleaved1F1B"),
    scheduled("InterleavedZeroBubble"),
    scheduled("ZBVZeroBubble"),
    scheduled("GPipe", "p2", **FULL),
    scheduled("1F1B", "p2", **SELECTIVE),
    scheduled("Interleaved1F1B", **FULL),
    scheduled("ZBVZeroBubble", "t2p2v2"),
    Case("d2c2", "fsdp:d2c2", options=SELECTIVE),
)


@contextlib.contextmanager
def engine_of(case: Case, *, offload: bool) -> Iterator[TrainEngine]:
    # Tiny hybrid models have two layers of each kind.
    path = model_dir(case.family) if case.family in ("qwen3_next", "bamba") else model_dir(case.family, **DEEP)
    with started(case.backend, path=path, **case.options, fsdp={**case.fsdp, "activation_offload": offload}) as engine:
        yield engine


def batch_of(engine: TrainEngine, seed: int) -> list[Sample]:
    return local_batch(
        engine, samples(CASES["family"], seed=seed) if engine.config.mb_spec.share_prefixes else global_batch(seed)
    )


def two_steps(engine: TrainEngine) -> tuple[list[StepOutput], dict[str, Tensor]]:
    """Train a step, and return the gradients of a second one."""
    first = engine.train_batch(batch_of(engine, 0), loss)
    second = engine.forward_backward(batch_of(engine, 1), loss)
    if engine.config.lora is None:
        return [first, second], gradients_of(engine)
    engine.optimizer_step()
    return [first, second], {name: tensor.clone() for name, tensor in engine.adapters.named_tensors()}


def in_use(engine: Any) -> tuple[int, int]:
    """Return the bytes of activations on the device and in host memory."""
    counts = engine._activations.counts
    return counts.on_device, counts.in_host


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=pytest.mark.world(ParallelDims.parse(case.backend).world_size))
        for case in CASES_OF_LAYOUTS
    ],
)
def test_numbers_are_those_without_offload(case: Case) -> None:
    with engine_of(case, offload=False) as engine:
        steps, tensors = two_steps(engine)
    with lazily(), engine_of(case, offload=True) as engine:
        same, others = two_steps(engine)
        assert in_use(engine) == (0, 0)
    assert [(step.loss, step.grad_norm) for step in same] == [(step.loss, step.grad_norm) for step in steps]
    assert same_bits(others, tensors)
    for step, without in zip(same, steps, strict=True):
        assert step.metrics["activation_offloaded_bytes"] >= step.metrics["activation_host_peak_bytes"] > 0
        assert not [name for name in without.metrics if name.startswith("activation")]


# ---- bytes


def sample_of(tokens: int, seed: int = 0) -> Sample:
    ids = torch.randint(VOCAB, (tokens,), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "advantages": torch.ones(tokens), "loss_mask": torch.ones(tokens)}


def bytes_of(layers: int, tokens: int, **options: Any) -> dict[str, float]:
    """Return the metrics of one micro-batch with one sequence."""
    given = {"path": model_dir("llama", num_hidden_layers=layers), "mb_spec": MicroBatchSpec(), **options}
    with lazily(1), started("fsdp:d1", fsdp={"activation_offload": True}, **given) as engine:
        step = engine.forward_backward([sample_of(tokens)], loss)
        assert in_use(engine) == (0, 0)
    return {name.removeprefix("activation_"): x for name, x in step.metrics.items() if name.startswith("activation_")}


@pytest.mark.world(1)
@pytest.mark.parametrize("how", ["none", "selective", "full"])
def test_device_keeps_two_layers_of_any_number(how: str) -> None:
    found = {(n, tokens): bytes_of(n, tokens, activation_checkpointing=how) for n in (3, 6) for tokens in (64, 128)}
    for tokens in (64, 128):
        shallow, deep = found[3, tokens], found[6, tokens]
        layer = (deep["offloaded_bytes"] - shallow["offloaded_bytes"]) / 3
        # The last of the layers stays on the device. All others are in host memory at the end of the forward.
        assert 2 * layer <= shallow["offloaded_bytes"] < 2.5 * layer
        assert deep["host_peak_bytes"] == deep["offloaded_bytes"]
        # The bytes on the device depend on the length, not on the number of layers.
        assert layer < deep["device_peak_bytes"] == shallow["device_peak_bytes"] < 2.5 * layer
    for n in (3, 6):
        for name, nbytes in found[n, 128].items():
            assert nbytes == pytest.approx(2 * found[n, 64][name], rel=0.01), name
    hidden = 128 * 32 * 4
    if how == "full":
        assert found[6, 128]["offloaded_bytes"] == 5 * hidden, "the inputs of layers"


@pytest.mark.world(1)
@pytest.mark.parametrize("how", ["full", "selective", "none"])
def test_page_has_the_bytes(how: str) -> None:
    shape = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
    paths = [model_dir("llama", num_hidden_layers=n, head_dim=64, **shape) for n in (3, 4)]
    three, four = (
        bytes_of(n, 64, path=path, activation_checkpointing=how) for n, path in zip((3, 4), paths, strict=True)
    )
    layer = four["offloaded_bytes"] - three["offloaded_bytes"]
    (row,) = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| `{how}` | ")]
    assert row.startswith(f"| `{how}` | {layer / 64:,.0f} | {four['device_peak_bytes'] / layer:.1f} | "), row


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case("layers"), id="layers", marks=pytest.mark.world(1)),
        pytest.param(Case("experts", "fsdp:e2", family="qwen3_moe"), id="experts", marks=pytest.mark.world(2)),
    ],
)
def test_gathered_weights_are_not_moved(case: Case) -> None:
    found = []
    for tokens in (16, 32):
        with lazily(), engine_of(case, offload=True) as engine:
            try:
                step = engine.forward_backward([sample_of(tokens, engine.dp_rank)], loss)
            except RuntimeError as error:  # FSDP frees weights after a forward
                pytest.fail(f"a weight was to be moved: {error}")
        found.append(step.metrics["activation_offloaded_bytes"])
    # The weights of a layer take more bytes than the activations of 16 tokens.
    assert found[1] == pytest.approx(2 * found[0], rel=0.05)


@pytest.mark.world(1)
def test_small_tensors_stay_on_the_device() -> None:
    path = model_dir("qwen3", **DEEP)
    with started("fsdp:d1", path=path, fsdp={"activation_offload": True}) as engine:
        step = engine.forward_backward([sample_of(20)], loss)
    assert step.metrics["activation_device_peak_bytes"] > 0
    assert "activation_offloaded_bytes" not in step.metrics


@pytest.mark.world(1)
@pytest.mark.parametrize("backend", ["fsdp:d1"])
def test_calls_without_gradients_move_nothing(backend: str) -> None:
    with lazily(), started(backend, path=model_dir("qwen3", **DEEP), fsdp={"activation_offload": True}) as engine:
        engine.forward_batch(global_batch())
        step = engine.eval_batch(global_batch(), loss)
        assert not [name for name in step.metrics if name.startswith("activation")]
        # Metrics are those of one step.
        first, second = (engine.train_batch(global_batch(), loss) for _ in range(2))
    names = [name for name in first.metrics if name.startswith("activation")]
    assert len(names) == 3
    assert [first.metrics[name] for name in names] == [second.metrics[name] for name in names]
    assert {first.reductions[name] for name in names if "peak" in name} == {"max"}


@pytest.mark.world(2)
def test_host_memory_of_a_pipeline_is_used_again() -> None:
    given = {"path": model_dir("qwen3", **DEEP), "mb_spec": MicroBatchSpec(n_mbs=6)}
    peaks = {}
    for schedule in ("GPipe", "1F1B"):
        fsdp = {"pipeline_schedule": schedule, "activation_offload": True}
        with lazily(), started("fsdp:p2", fsdp=fsdp, **given) as engine:
            step = engine.forward_backward(global_batch(), loss)
            blocks = len(engine._activations._tools.pool._free)  # type: ignore[attr-defined]
            engine.forward_backward(global_batch(), loss)
            assert len(engine._activations._tools.pool._free) == blocks > 0  # type: ignore[attr-defined]
        peaks[schedule] = step.metrics["activation_host_peak_bytes"] / step.metrics["activation_offloaded_bytes"]
    assert peaks["1F1B"] < 0.5 * peaks["GPipe"], "at most two micro-batches are under way on a stage"


# ---- faults


class Stop(Exception):
    """Error of a test."""


@pytest.mark.world(1)
@pytest.mark.parametrize("where", ["loss", "layer"])
def test_error_releases_host_memory(where: str) -> None:
    path, calls = model_dir("qwen3", **DEEP), []
    # In the second micro-batch. Before the first, a loss is computed for both halves of it.
    failing_call = 4 if where == "loss" else 2

    def failing(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == failing_call:
            raise Stop
        return loss(*args) if where == "loss" else None

    given = {"path": path, "fsdp": {"activation_offload": True}}
    with lazily(), started("fsdp:d1", **given) as engine, started("fsdp:d1", **given) as untouched:
        hook = None
        if where == "layer":
            layers: Any = engine._components.model[0].hf.model.layers  # type: ignore[attr-defined]
            hook = layers[2].register_forward_pre_hook(failing)
        with pytest.raises((RuntimeError, Stop)) as caught:  # keeps the frames of the call, and the graphs in them
            engine.train_batch(global_batch(), failing if where == "loss" else loss)
        assert "Stop" in repr((caught.value, caught.value.__cause__))
        assert in_use(engine)[1] == 0
        if hook is not None:
            hook.remove()
        step, expected = (each.train_batch(global_batch(1), loss) for each in (engine, untouched))
        assert (step.loss, step.grad_norm) == (expected.loss, expected.grad_norm)
