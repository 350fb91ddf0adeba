"""Bugs of the training backend that the suite must catch: requests that fail alone, losses, steps, memory and checkpoints."""

from __future__ import annotations

import dataclasses
from typing import Any

from areal.tests.mutants.planting import Function, mutant

SERVER = "unit/tinker/backends/"


@mutant(
    "areal.engine.lora.adapter:Adapter.before_backward",
    "dist/checkpoint/test_lora_set_aside.py::test_gradients_that_are_aside_survive_a_failing_call[fsdp:d2]",
)
def reduced_gradients_put_aside_on_all_ranks(right: Function) -> Function:
    """A reduced gradient is set aside on every rank, and counts once per rank when it is back."""
    return lambda self: None


@mutant(
    "areal.engine.lora.adapter:Adapter.set_gradients_aside",
    SERVER + "test_engine_backend.py::test_failing_request_adds_nothing[1]",
)
def failing_request_discards_earlier_ones(right: Function) -> Function:
    """A request that fails discards the gradients of the model's earlier requests."""
    return lambda self: None


@mutant(
    "areal.tinker.backends.losses.cross_entropy:CrossEntropy.__call__",
    SERVER + "test_losses.py::test_weight_of_zero_is_a_request_without_effect",
    SERVER + "test_losses.py::test_value_and_gradient_are_those_of_the_formula[cross_entropy]",
)
def loss_normalised_by_its_weights(right: Function) -> Function:
    """The server divides a loss by the sum of its weights."""

    def wrong(self: Any, outputs: Any, batch: Any) -> Any:
        loss, metrics = right(self, outputs, batch)
        return loss / batch["weights"].sum().abs().clamp(min=1), metrics

    return wrong


@mutant(
    "areal.tinker.backends.samples:target_arrays",
    SERVER + "test_engine_backend.py::test_outputs_are_in_the_callers_order",
)
def outputs_in_packed_order(right: Function) -> Function:
    """Log-probs are returned in the order of their lengths."""
    return lambda outputs, data: sorted(right(outputs, data), key=len)


@mutant(
    "areal.tinker.backends.adam:step_settings",
    SERVER + "test_optim_step.py::test_steps_equal_torchs_adamw",
)
def step_clips_by_default(right: Function) -> Function:
    """A clip norm of 0 clips to 1."""

    def wrong(params: Any) -> Any:
        settings = right(params)
        return settings if params.grad_clip_norm else dataclasses.replace(settings, gradient_clipping=1.0)

    return wrong


@mutant(
    "areal.tinker.backends.base_model:find_base_model",
    SERVER + "test_checkpoints.py::test_checkpoint_of_another_base_model_is_refused",
)
def base_model_known_by_its_shape(right: Function) -> Function:
    """The fingerprint of a base model does not depend on its weights."""
    return lambda name: dataclasses.replace(right(name), fingerprint="qwen3")


@mutant(
    "areal.tinker.backends.adapter_memory:rank_memory",
    SERVER + "test_engine_backend.py::test_short_memory_is_reported_and_delete_releases_it",
)
def memory_of_weights_only(right: Function) -> Function:
    """The memory of gradients and moments that do not exist yet is not counted."""
    return lambda engine, shard: dataclasses.replace(right(engine, shard), missing=0)
