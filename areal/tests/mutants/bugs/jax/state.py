"""Bugs in the state of the JAX engine: checkpoints, memory, and arrays that a failed program has consumed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from areal.tests.mutants.planting import Function, mutant

_CHECKPOINT = "dist/jax/test_jax_checkpoint.py::{}"


@mutant(
    "areal.engine.jax.checkpoint:JAXCheckpointer._read_counts",
    _CHECKPOINT.format("test_layers_with_different_steps_are_refused[jax:d1]"),
)
def resumed_without_steps(right: Function) -> Function:
    """A resumed optimizer corrects the bias of its moments as in the first step."""
    return lambda self, path, metadata: dict.fromkeys(self._model.arrays, 0)


@mutant(
    "areal.engine.jax.model_arrays:ModelState.weights_in",
    _CHECKPOINT.format("test_random_weights_are_those_of_the_fsdp_engine[jax:d1]"),
)
def layers_in_reverse(right: Function) -> Function:
    """The rows of arrays over layers get the names of other layers."""

    def wrong(self: Any, name: str, boxes: Any) -> Any:
        parts = right(self, name, boxes)
        return [(weight, *rest) for (weight, *_), (_, *rest) in zip(reversed(parts), parts, strict=True)]

    return wrong


@mutant(
    "areal.engine.jax.model_arrays:ModelState.weights_in",
    _CHECKPOINT.format("test_random_weights_are_those_of_the_fsdp_engine[jax:t2]"),
)
def box_of_the_first_rank(right: Function) -> Function:
    """Every rank fills its shards with the values of the first one."""

    def wrong(self: Any, name: str, boxes: Any) -> Any:
        return right(self, name, [(tuple(slice(0, each.stop - each.start) for each in box), x) for box, x in boxes])

    return wrong


@mutant("areal.engine.jax.offload:_shard_bytes", "dist/step/test_memory_report.py::test_report_is_of_the_shard[jax:d2]")
def bytes_of_all_ranks(right: Function) -> Function:
    """The report counts the shards of all ranks."""
    return lambda array: array.nbytes


@mutant(
    "areal.engine.jax.optimizer:consuming",
    "dist/jax/test_jax_failed_programs.py::test_failed_step_that_lost_arrays_ends_the_engine[*update*jax:d1]",
)
def usable_without_weights(right: Function) -> Function:
    """A failed optimizer step leaves an engine without weights that says that it can be used."""

    @contextlib.contextmanager
    def wrong(given: Any, what: str, restore: Any) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            restore()
            raise RuntimeError(f"the optimizer step failed: {error}") from error

    return wrong


@mutant("areal.engine.jax.weights:_gathered", "dist/parallel/test_gathered_bytes.py::test_jax_gathers*[*jax:d2]")
def jax_shards_gathered_before_the_cast(right: Function) -> Function:
    """A stream of weights in a narrower dtype gathers master weights."""
    return lambda spec, dtype, divided, array: right(spec, str(array.dtype), divided, array).astype(dtype)
