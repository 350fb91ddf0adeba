"""Bugs of Muon that the suite must catch: updates of shards, of several matrices as one, and of another size."""

from __future__ import annotations

from typing import Any

from areal.tests.mutants.planting import Function, mutant

STEPS = "dist/optimizers/test_muon.py::test_three_steps_track_the_reference[{}]"
MATRICES = "unit/engine/muon/test_matrices.py::{}"


@mutant(
    "areal.engine.torch.muon.whole_matrices:WholeMatrices.replace",
    STEPS.format("qwen3-fsdp:d2"),
    STEPS.format("qwen3-megatron:t2"),
)
def shards_orthogonalised_alone(right: Function) -> Function:
    """Each rank orthogonalises its rows of a matrix."""

    def wrong(self: Any, parts: Any, function: Any) -> None:
        for (matrix, _), x in zip(self._number, parts, strict=True):
            x.copy_(function({matrix: x.clone()})[matrix])

    return wrong


@mutant("areal.engine.torch.muon.newton_schulz:orthogonalised", STEPS.format("qwen3_moe-fsdp:d1"))
def matrices_of_one_shape_orthogonalised_as_one(right: Function) -> Function:
    """Matrices that are computed together are one, whose rows are those of each."""
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
    return lambda shape, config: right((shape[-1], shape[-2]), config)


@mutant(
    "areal.engine.torch.muon.whole_matrices:_cost",
    "dist/optimizers/test_muon.py::test_work_is_divided_over_ranks[w2-fsdp:d2]",
    "dist/optimizers/test_muon.py::test_work_is_divided_over_ranks[w2-megatron:t2]",
)
def one_rank_computes_all_matrices(right: Function) -> Function:
    """Matrices cost nothing, so that the first rank gets all of them."""
    return lambda shape: 0.0


@mutant("areal.engine.torch.muon.updates:MatrixUpdates._momentum", STEPS.format("qwen3-fsdp:d1"))
def momentum_begins_anew_in_each_step(right: Function) -> Function:
    """The momentum of earlier steps is lost."""
    return lambda self, optimizer, x: right(self, optimizer, x).zero_()


@mutant("areal.engine.megatron.optimizer.muon:_parts", STEPS.format("qwen3-megatron:d1"))
def parameters_of_megatron_as_one_matrix(right: Function) -> Function:
    """Queries, keys and values are one parameter of Megatron-Core, and orthogonalised as one matrix."""

    def wrong(local_param: Any, start: int, x: Any) -> Any:
        rows, columns = local_param.parameter.shape
        yield ((local_param.name, 0), (0, rows, 0, columns)), x.view(rows, columns)

    return wrong


@mutant(
    "areal.engine.jax.muon:_placed",
    "dist/jax/test_programs.py::test_muon_spreads_matrices_over_devices[w2]",
)
def every_device_computes_all_matrices(right: Function) -> Function:
    """The matrices are gathered on all devices."""
    return lambda spec, x, placement: right(spec, x, ((), (), ()))
