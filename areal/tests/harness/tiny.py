"""Small engines and batches for tests of one property of an engine, outside the grid."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from transformers import GPT2Config, PreTrainedModel

from areal.api import (
    Batch,
    FinetuneSpec,
    MicroBatchSpec,
    OptimizerConfig,
    ParallelDims,
    TokenOutputs,
    TrainEngine,
    TrainEngineConfig,
)
from areal.engine.checkpoint.checkpointer import EngineCheckpointer
from areal.engine.registry import create_engine
from areal.tests.grid.cases import CASES, samples
from areal.tests.grid.models import VOCAB, model_dir, tiny_model
from areal.tests.harness.world import digest, locked, world
from areal.utils import platform

Sample = dict[str, Tensor]

NEEDS_CPU = pytest.mark.skipif(platform.accelerator() != "cpu", reason="Megatron-Core is planned without a GPU only")
"""Mark of tests of plans of the Megatron engine."""

LAYOUTS = {
    1: ("fsdp:d1", "megatron:d1"),
    2: ("fsdp:d2", "fsdp:c2", "fsdp:p2", "megatron:p2"),
    4: ("fsdp:d2c2", "megatron:t2p2"),
}
"""Layouts of tests that run on every layout, by world size."""

NEEDS_JAX = pytest.mark.skipif(find_spec("jax") is None, reason="the extra jax is not installed")
"""Mark of tests of the JAX engine."""

OPTIMIZER = OptimizerConfig(lr=0.01, lr_scheduler="linear", gradient_clipping=0.5)


def config(backend: str, **changes: Any) -> TrainEngineConfig:
    """Return the configuration of a float32 engine on the tiny Qwen3, with micro-batches of at most 40 tokens and ``changes``."""
    defaults: dict[str, Any] = {
        "path": family_dir("qwen3") if "path" not in changes else changes["path"],
        "dtype": "float32",
        "optimizer": OPTIMIZER,
        "mb_spec": MicroBatchSpec(max_tokens_per_mb=40),
    }
    return TrainEngineConfig(backend=backend, **{**defaults, **changes})


@contextmanager
def started(backend: str, *, total_steps: int = 1000, **changes: Any) -> Iterator[TrainEngine]:
    """Start an engine of :func:`config` and destroy it at the end."""
    engine = create_engine(config(backend, **changes))
    engine.initialize(FinetuneSpec(total_train_steps=total_steps))
    with engine:
        yield engine


def layouts(*sizes: int, engine: str = "", but: tuple[str, ...] = (), also: tuple[str, ...] = ()) -> list[Any]:
    """Return the layouts of these world sizes (of one engine, without ``but``, and with ``also``), each marked with its size."""
    known = [backend for size in sizes for backend in LAYOUTS[size] if backend.startswith(engine)]
    return chosen(*(backend for backend in known if backend not in (*but, *also)), *also)


def chosen(*backends: str) -> list[Any]:
    """Return these layouts as parameters; see :func:`layout`."""
    return [layout(backend) for backend in backends]


def layout(backend: str, *values: Any) -> Any:
    """Return a layout, and further values, as a parameter: marked with its world size, and skipped without the packages of its engine."""
    jax = backend.startswith("jax:")
    # On a busy machine, compiling takes minutes.
    marks = [pytest.mark.world(ParallelDims.parse(backend).world_size, **({"timeout": 400} if jax else {}))]
    marks += [NEEDS_JAX] if jax else []
    return pytest.param(backend, *values, id="-".join([backend, *map(str, values)]), marks=marks)


def checkpointer_of(engine: TrainEngine, source: str, **options: Any) -> EngineCheckpointer:
    """Return a checkpointer for an engine, with options that the engine does not expose."""
    components = engine._components
    kind: Any = type(components.checkpointer)
    run = (engine, engine.control, source)
    if kind.engine == "fsdp":
        return kind(components.model, components.optimizer, *run, **options)
    if kind.engine == "jax":
        return kind(components.model, components.optimizer, components.weights, *run, **options)
    own = components.checkpointer
    parts = (own._chunks, own._chained, components.optimizer, components.weights, own._groups)
    return kind(*parts, *run, **options)


@contextmanager
def programs_that(act: Callable[[], None], *names: str, on_call: int) -> Iterator[None]:
    """Call ``act`` before the ``on_call``-th program, from 0, of the functions ``names`` of the JAX engine's bridge."""
    bridge, calls = import_module("areal.engine.jax.bridge"), 0

    def acting(program: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == on_call + 1:
                act()
            return program(*args)

        return run

    with ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(bridge, name, acting(getattr(bridge, name))))
        yield


def global_batch(seed: int = 0) -> list[Sample]:
    """Return the global batch: nine sequences of 1 to 38 tokens."""
    return samples(CASES["ragged"], seed=seed)


def local_batch(engine: TrainEngine, everything: list[Sample]) -> list[Sample]:
    """Return this rank's shard of a global batch."""
    return everything[engine.dp_rank :: engine.dp_size]


def uneven_batch(engine: TrainEngine) -> list[Sample]:
    """Return one sequence on the first data-parallel rank, which fills up with others if each is a micro-batch, and three on the others."""
    everything, first = global_batch(), 3 * engine.dp_rank
    return everything[first : first + 3] if first else everything[:1]


def loss(out: TokenOutputs, batch: Batch) -> Tensor:
    """Compute a policy gradient without a ratio."""
    return -(out.logprobs * batch["advantages"] * batch["loss_mask"]).sum()


BATCH_VERBS: tuple[Callable[[TrainEngine, Any], Any], ...] = (
    lambda engine, batch: engine.train_batch(batch, loss),
    lambda engine, batch: engine.forward_backward(batch, loss),
    lambda engine, batch: engine.eval_batch(batch, loss),
    lambda engine, batch: engine.forward_batch(batch),
    lambda engine, batch: engine.microbatches(batch),
)
"""Every verb that takes a batch."""


def weights_of(engine: TrainEngine) -> dict[str, Tensor]:
    """Copy all weights. Collective."""
    return {name: tensor.clone() for name, tensor in engine.named_tensors()}


def gradients_of(engine: TrainEngine) -> dict[str, Tensor]:
    """Copy all pending gradients. Collective."""
    return {name: tensor.clone() for name, tensor in engine.named_gradients()}


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Return True if two sets of tensors are equal bit for bit, including NaNs."""
    return a.keys() == b.keys() and all(
        torch.equal(a[name].reshape(-1).view(torch.uint8), b[name].reshape(-1).view(torch.uint8)) for name in a
    )


def process_groups() -> int:
    """Return the number of process groups of this process."""
    return len(dist.distributed_c10d._world.pg_map)


def family_dir(family: str, **changes: Any) -> str:
    """Call :func:`~areal.tests.grid.models.model_dir` on whichever rank is first."""
    with writing():
        return model_dir(family, **changes)


def gradients_as_in_files(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the gradients under the names that transformers writes: it saves a model whose weights they are."""
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    for buffer in model.buffers():
        buffer.data = torch.full_like(buffer, torch.nan, dtype=torch.float64)
    with tempfile.TemporaryDirectory() as folder, writing():
        model.save_pretrained(folder)
        saved = load_file(Path(folder) / "model.safetensors")
    return {name: tensor for name, tensor in saved.items() if not tensor.isnan().all()}


@contextmanager
def writing() -> Iterator[None]:
    """Enable ``save_pretrained`` on this rank: inside a process group it writes on rank 0 only."""
    with mock.patch.object(dist, "is_initialized", return_value=False):
        yield


def gpt2_dir(**changes: Any) -> str:
    """Return the directory of a tiny GPT-2: learned positions, dropout, tied embeddings, no family-specific code."""
    fields: dict[str, Any] = {
        "vocab_size": VOCAB,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 128,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
    } | changes
    path = world().cache / f"gpt2-{digest(sorted(fields.items()))}"
    with locked(path):
        if not path.exists():
            partial = Path(f"{path}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            with writing():
                tiny_model(GPT2Config(**fields), seed=0).save_pretrained(partial)
            partial.rename(path)
    return str(path)


JAX = ("jax:d1", "jax:d2")
