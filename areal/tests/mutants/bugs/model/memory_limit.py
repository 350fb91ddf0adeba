"""Bugs of the limit of memory of passes, and of their measured bytes, that the suite must catch."""

from __future__ import annotations

from typing import Any

from areal.tests.harness.world import world
from areal.tests.mutants.planting import Function, mutant

REFUSED = "dist/faults/test_memory_limit.py::test_pass_that_does_not_fit_is_refused"


@mutant(
    "areal.utils.profiling.pass_bytes:PassBytes.needed",
    f"{REFUSED}[fsdp:d1]",
    f"{REFUSED}[megatron:d1]",
)
def longer_passes_need_no_more(right: Function) -> Function:
    """The tokens of a pass are not counted: it needs what the largest one has needed."""
    return lambda self, tokens: right(self, min(tokens, self._measured[-1][0]))


@mutant("areal.engine.memory_limit:peak_bytes", f"{REFUSED}[fsdp:d1]", f"{REFUSED}[megatron:d1]")
def peak_of_a_pass_not_read(right: Function) -> Function:
    """The bytes after a pass count as its peak."""
    return lambda device: 0


@mutant("areal.engine.step_sync:check_claims", f"{REFUSED}[fsdp:d2]")
def memory_of_the_first_rank_only(right: Function) -> Function:
    """The memory of other ranks is not checked."""
    return lambda claims, tokens, longest: right(claims[:1], tokens[:1], longest[:1])


@mutant("areal.engine.step_sync:check_claims", f"{REFUSED}[fsdp:d2]")
def one_rank_refuses_alone(right: Function) -> Function:
    """A rank checks its own memory only, so that its peers go on without it."""

    def wrong(claims: Any, tokens: Any, longest: Any) -> None:
        here = world().rank
        right([claim if rank == here else None for rank, claim in enumerate(claims)], tokens, longest)

    return wrong


@mutant(
    "areal.engine.memory_limit:MemoryLimit.claim",
    "dist/faults/test_memory_limit.py::test_free_memory_is_the_limit_and_kinds_are_apart[fsdp:d1]",
)
def passes_of_all_kinds_alike(right: Function) -> Function:
    """Passes without gradients are compared with those that have some."""
    return lambda self, kind, tokens, always: right(self, next(iter(self._passes), kind), tokens, always=always)
