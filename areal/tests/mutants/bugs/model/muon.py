"""Bugs of Muon that the suite must catch: updates of shards, of several matrices as one, and of another size."""

from __future__ import annotations

from typing import Any

from areal.tests.mutants.planting import Function, mutant

STEPS = "dist/optimizers/test_muon.py::test_three_steps_track_the_reference[{}]"
MATRICES = "unit/engine/muon/test_matrices.py::{}"


@mutant("areal.engine.torch.muon.whole_matrices:WholeMatrices.apply", STEPS.format("qwen3-fsdp:d2"))
def shards_orthogonalised_alone(right: Function) -> Function:
    """Each rank orthogonalises its rows of a matrix."""
    return lambda self, shards, function: [function(number, x) for number, x in enumerate(shards)]


@mutant("areal.engine.torch.muon.newton_schulz:orthogonalised", STEPS.format("qwen3_moe-fsdp:d1"))
def experts_orthogonalised_as_one_matrix(right: Function) -> Function:
    """The matrices of all experts are one, whose rows are those of each."""
    return lambda x, config: right(x.flatten(0, -2), config).view(x.shape)


@mutant(
    "areal.engine.torch.muon.matrices:_sizes",
    MATRICES.format("test_parameters_that_are_several_matrices_are_cut_into_them"),
    MATRICES.format("test_projections_of_recurrent_layers_are_cut[nemotron_h-mixer.in_proj-5]"),
)
def fused_projections_as_one_matrix(right: Function) -> Function:
    """Projections of queries, keys and values in one parameter are orthogonalised as one matrix."""
    return lambda *args: None


@mutant(
    "areal.engine.torch.muon.newton_schulz:update_scale",
    MATRICES.format("test_scales_are_of_the_shape_of_a_matrix"),
    STEPS.format("qwen3_moe-fsdp:d2"),
)
def scale_of_the_transposed_matrix(right: Function) -> Function:
    """The size of an update is that of the transposed matrix."""
    return lambda x, config: right(x.mT, config)


@mutant(
    "areal.engine.torch.muon.whole_matrices:_cost",
    "dist/optimizers/test_muon.py::test_work_is_divided_over_ranks[w2-d2]",
)
def one_rank_computes_all_matrices(right: Function) -> Function:
    """Matrices cost nothing, so that the first rank gets all of them."""
    return lambda x: 0.0


@mutant(
    "areal.engine.torch.muon.optimizer:Muon._direction",
    STEPS.format("qwen3-fsdp:d1"),
)
def momentum_begins_anew_in_each_step(right: Function) -> Function:
    """The momentum of earlier steps is lost."""

    def wrong(self: Any, parameter: Any) -> Any:
        self.state.pop(parameter, None)
        return right(self, parameter)

    return wrong
