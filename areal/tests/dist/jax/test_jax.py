"""The JAX engine: options of its families, precision of its gradients, the bridge to torch, and what it refuses."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from areal.api import Batch, FinetuneSpec, MicroBatchSpec, TokenOutputs
from areal.engine.registry import create_engine
from areal.tests.grid.cases import CASES, samples
from areal.tests.grid.cell_engine import start_cell
from areal.tests.grid.compare import assert_step, assert_tensors
from areal.tests.grid.layouts import Cell, Layout
from areal.tests.harness.tiny import config, family_dir, global_batch, gradients_of, loss, same_bits, started
from areal.tests.harness.world import record

pytest.importorskip("jax")

import jax
from jax._src import array

from areal.engine.jax.model import spec
from areal.engine.jax.model.fused_attention import Kernel

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS = {
    "window of every layer": ("mistral", {}),
    "window of one layer": (
        "qwen3",
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5, "use_sliding_window": True},
    ),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "scaled frequencies": ("llama", {"rope_parameters": LLAMA3}),
    "scaled rotation": ("qwen3", {"rope_parameters": YARN}),
    "no token for padding": ("qwen2", {"pad_token_id": None}),
}
"""Options of configurations that the families of the grid do not have."""


@pytest.mark.world(1)
@pytest.mark.parametrize(
    "name",
    sorted(MODELS, key=lambda name: name != "window of one layer"),
)
def test_options_of_a_family_agree_with_the_reference(name: str) -> None:
    family, changes = MODELS[name]
    cell = Cell(Layout("jax:d1", changes=changes), family, "terms", "ragged", "tokens64")
    objective = cell.objective
    with start_cell(cell) as run:
        expected, _ = run.expected()
        step = run.engine.forward_backward(
            run.batch(), objective.loss_fn, objective.weight_fn, outputs=objective.outputs
        )
        error = assert_step(step, expected, cell.tolerance)
        gradients = assert_tensors(run.engine.named_gradients(), expected.gradients, cell.gradient_tolerance)
    record("options of families in JAX", name, loss=f"{error:.0e}", gradients=f"{gradients:.0e}")


@pytest.mark.world(1)
def test_gradients_of_a_bfloat16_model_are_not_rounded() -> None:
    with started("jax:d1", dtype="bfloat16") as engine:
        engine.forward_backward(global_batch(), loss)
        rounded = [name for name, x in gradients_of(engine).items() if torch.equal(x, x.bfloat16().float())]
    assert rounded == []


def in_place(out: TokenOutputs, batch: Batch) -> Tensor:
    """The same loss, computed in the memory of the outputs."""
    assert out.logprobs is not None
    return out.logprobs.mul_(batch["advantages"]).mul_(batch["loss_mask"]).neg_().sum()


def backward_twice(out: TokenOutputs, batch: Batch) -> Tensor:
    """A loss that calls backward itself."""
    value = loss(out, batch)
    value.backward(retain_graph=True)
    return value


@pytest.mark.world(1)
def test_losses_use_outputs_as_tensors_of_torch() -> None:
    with started("jax:d1") as engine:
        expected = engine.forward_backward(global_batch(), loss).loss, gradients_of(engine)
        engine.zero_grad()
        assert engine.forward_backward(global_batch(), in_place).loss == expected[0]
        assert all(torch.equal(x, expected[1][name]) for name, x in gradients_of(engine).items())
        engine.zero_grad()
        with pytest.raises(ValueError, match="loss_fn called backward itself"):
            engine.forward_backward(global_batch(), backward_twice)
        engine.zero_grad()
        assert engine.forward_backward(global_batch(), loss).loss == expected[0]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "letter": ({"backend": "jax:p2"}, r"the jax engine has no p \(pipeline parallel\)"),
    "family": ({"family": "gemma3_text"}, r"model_type = 'gemma3_text' .* choose 'fsdp'"),
    "dropout": ({"family": "llama", "attention_dropout": 0.1}, r"attention_dropout = 0.1 .* set it to 0"),
    "activation": ({"family": "llama", "hidden_act": "gelu"}, r"hidden_act = 'gelu'"),
    "selective": ({"activation_checkpointing": "selective"}, "the JAX engine has 'none' and 'full'"),
    "sync": ({"grad_sync": "micro_batch"}, r"grad_sync = 'micro_batch' .* does not support"),
}


@pytest.mark.world(1)
@pytest.mark.parametrize("what", REFUSED)
def test_what_the_engine_has_not_is_refused_by_name(what: str) -> None:
    fields, message = REFUSED[what]
    fields = {"backend": "jax:d1", **fields}
    if "family" in fields:
        changes = {name: fields.pop(name) for name in ("attention_dropout", "hidden_act") if name in fields}
        fields["path"] = family_dir(fields.pop("family"), **changes)
    with pytest.raises(ValueError, match=message), create_engine(config(**fields)) as engine:
        engine.initialize(FinetuneSpec(total_train_steps=1))


@pytest.mark.world(1)
def test_kernel_computes_packed_sequences_and_blocks_shared_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec, "kernel_for", lambda *_: Kernel("splash", interpret=True))
    batch, results = samples(CASES["family"]), {}
    for shared, kernel in itertools.product((False, True), repeat=2):
        mb_spec = MicroBatchSpec(max_tokens_per_mb=512, share_prefixes=shared)
        with started("jax:d1", mb_spec=mb_spec, jax={"attention_kernel": kernel}) as engine:
            engine.forward_backward(batch, loss)
            results[shared, kernel] = gradients_of(engine)
    assert not same_bits(results[False, True], results[False, False])
    error = assert_tensors(results[False, True].items(), results[False, False], 2e-5)
    record("attention kernels of JAX", "splash, interpreted", gradients=f"{error:.0e}")
    assert same_bits(results[True, True], results[True, False])


@pytest.mark.world(1)
def test_arrays_of_a_tpu_enter_and_leave_through_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX lends the memory of CPUs and GPUs only to other libraries."""
    with started("jax:d1") as engine, started("jax:d1") as untouched:
        batch = global_batch()
        expected = untouched.train_batch(batch, loss), untouched.forward_batch(batch)
        monkeypatch.setattr(array.ArrayImpl, "platform", lambda self: "tpu")
        with pytest.raises(BufferError):
            torch.from_dlpack(jax.numpy.zeros(2))
        try:
            found = engine.train_batch(batch, loss), engine.forward_batch(batch)
        except RuntimeError as error:
            pytest.fail(str(error))
        assert (found[0].loss, found[0].grad_norm) == (expected[0].loss, expected[0].grad_norm)
        assert all(torch.equal(x, y) for x, y in zip(found[1], expected[1], strict=True))
        on_a_tpu = [(name, tensor.clone()) for name, tensor in engine.named_tensors()]
        monkeypatch.undo()
        assert same_bits(dict(on_a_tpu), dict(untouched.named_tensors()))
