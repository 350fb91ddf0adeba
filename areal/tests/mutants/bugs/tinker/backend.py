"""Bugs of the training backend that the suite must catch: requests that fail alone, losses, steps, memory and checkpoints."""

from __future__ import annotations

import dataclasses
from typing import Any

from areal.tests.mutants.planting import Function, mutant

SERVER = "unit/tinker/backends/"


@mutant(
    "areal.tinker.backends.training.passes:run_passes",
    SERVER + "test_passes.py::test_requests_that_share_a_call_have_the_results_of_separate_calls",
)
def shared_call_returns_results_of_another_request(right: Function) -> Function:
    """Results of requests that share a call are returned in the reverse order."""
    return lambda group, names, passes, *, train: right(group, names, passes, train=train)[::-1]


@mutant(
    "areal.tinker.backends.training.passes:divide_into_calls",
    SERVER + "test_passes.py::test_bad_request_in_a_shared_call_fails_alone",
    SERVER + "test_passes.py::test_requests_of_one_model_keep_their_order",
)
def requests_of_a_model_share_a_call(right: Function) -> Function:
    """All requests share one call, also those of one model."""
    return lambda passes, most_tokens: iter([list(range(len(passes)))] if passes else [])


@mutant(
    "areal.tinker.backends.losses.loss_table:CrossEntropy.__call__",
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
    "areal.tinker.backends.training.passes:target_arrays",
    SERVER + "test_engine_backend.py::test_outputs_are_in_the_callers_order",
)
def outputs_in_packed_order(right: Function) -> Function:
    """Log-probs are returned in the order of their lengths."""
    return lambda outputs, data: sorted(right(outputs, data), key=len)


@mutant(
    "areal.tinker.backends.training.adam:step_settings",
    SERVER + "test_optim_step.py::test_steps_equal_torchs_adamw",
)
def step_clips_by_default(right: Function) -> Function:
    """A clip norm of 0 clips to 1."""

    def wrong(params: Any) -> Any:
        settings = right(params)
        return settings if params.grad_clip_norm else dataclasses.replace(settings, gradient_clipping=1.0)

    return wrong


@mutant(
    "areal.tinker.backends.training.base_model:find_base_model",
    SERVER + "test_model_checkpoints.py::test_checkpoint_of_another_base_model_is_refused",
)
def base_model_known_by_its_shape(right: Function) -> Function:
    """The fingerprint of a base model does not depend on its weights."""
    return lambda name: dataclasses.replace(right(name), fingerprint="qwen3")


@mutant(
    "areal.tinker.backends.training.adapter_memory:rank_memory",
    SERVER + "test_engine_backend.py::test_short_memory_is_reported_and_delete_releases_it",
)
def memory_of_weights_only(right: Function) -> Function:
    """The memory of gradients and moments that do not exist yet is not counted."""
    return lambda engine, shard: dataclasses.replace(right(engine, shard), missing=0)


@mutant(
    "areal.tinker.backends.training.pass_memory:rank_memory",
    SERVER + "test_backend_memory.py::test_pass_that_does_not_fit_is_refused",
)
def memory_of_other_adapters_given_to_a_pass(right: Function) -> Function:
    """A pass may use the memory that other adapters need for their gradients and moments."""
    return lambda engine, shard: dataclasses.replace(right(engine, shard), missing=0)


@mutant(
    "areal.tinker.backends.training.pass_memory:_give_back",
    SERVER + "test_backend_memory.py::test_memory_of_a_large_pass_returns",
)
def memory_of_a_pass_kept(right: Function) -> Function:
    """The memory of a large pass stays with the process."""
    return lambda engine, shard: None


@mutant(
    "areal.tinker.backends.training.engine_backend:probe_pass",
    SERVER + "test_backend_memory.py::test_each_rank_computes_the_tokens_of_a_probe[data parallel]",
)
def probe_of_all_ranks_counted_for_each(right: Function) -> Function:
    """The tokens of a probe are divided over data-parallel ranks."""
    return lambda adapter, tokens, max_tokens, copies: right(adapter, tokens, max_tokens, 1)


@mutant(
    "areal.tinker.backends.sampling.local_sampler:LocalSampler.borrow",
    SERVER + "test_backend_memory.py::test_sampler_reads_the_engines_base_model[qwen3]",
)
def base_model_in_memory_twice(right: Function) -> Function:
    """The sampler keeps its own base model."""
    return lambda self, parameters: 0
