"""Bugs of option checks that the suite must catch."""

from __future__ import annotations

from areal.tests.mutants.planting import Function, mutant

REFUSED = "dist/test_options.py::test_an_option_that_an_engine_does_not_support_is_refused[{}]"
UNDECLARED = "unit/engine/test_parallel_dims_and_config.py::test_options_that_an_engine_does_not_declare_are_refused[*value_head*]"


@mutant("areal.engine.options:_unsupported", UNDECLARED)
def unsupported_options_ignored(right: Function) -> Function:
    """An option that the engine does not support has no effect and raises no error."""
    return lambda values, supported, prefix="": iter(())


@mutant("areal.engine.options:_changed", REFUSED.format("megatron-fsdp.compile"))
def foreign_sections_ignored(right: Function) -> Function:
    """Options in the section of another engine have no effect and raise no error."""
    return lambda name, section: iter(())
