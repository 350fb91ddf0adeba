"""Bugs of the options of one call, and of critics in the form of other libraries."""

from __future__ import annotations

from typing import Any

from areal.tests.mutants.planting import Function, mutant

OPTIONS = "dist/step/test_call_options.py::"


@mutant("areal.engine.batch_rules:BatchRules.cutting_by", OPTIONS + "test_spec_of_a_call_cuts*[fsdp:d1]")
def spec_of_a_call_ignored(right: Function) -> Function:
    """A call is cut as the engine is configured."""
    return lambda self, spec: self


@mutant("areal.utils.data.bins:_consecutive", OPTIONS + "test_spec_of_a_call_cuts*[fsdp:d1]")
def last_samples_left_out(right: Function) -> Function:
    """The last micro-batch of ``samples_per_mb`` is left out."""
    return lambda n, each, adapters: right(n, each, adapters)[:-1]


@mutant("areal.api.step_settings:ParamGroup.__getitem__", OPTIONS + "test_schedule_of_the_caller*[fsdp:d1]")
def parameter_group_with_the_configured_rate(right: Function) -> Function:
    """A parameter group reads the learning rate of the configuration."""
    return lambda self, key: self._engine.config.optimizer.lr


@mutant("areal.engine.state:EngineState.local_tensors", OPTIONS + "test_local_tensors*[fsdp:d2]")
def parts_at_the_beginning(right: Function) -> Function:
    """The part of each rank is at the beginning of its weight."""

    def wrong(self: Any, **options: Any) -> Any:
        for part in right(self, **options):
            yield part._replace(box=tuple(slice(0, n) for n in part.tensor.shape))

    return wrong


CLASSIFIERS = (
    "dist/parallel/test_classifiers.py::test_classifier_is_trained_as_by_torch_and_saved_as_one[fsdp:d1-tokens]"
)


@mutant("areal.engine.checkpoint.huggingface:_as_classifier", CLASSIFIERS)
def critic_saved_as_a_language_model(right: Function) -> Function:
    """A critic is saved with the names of a language model with a value head."""
    return lambda export: export
