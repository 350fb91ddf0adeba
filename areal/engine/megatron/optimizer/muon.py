"""Muon beside Megatron-Core's AdamW: the matrices of the main parameters that a rank has."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence

import torch.distributed as dist
from megatron.core.optimizer.optimizer import ChainedOptimizer
from torch import Tensor

from areal.api.sections.optimizer import MuonConfig
from areal.engine.megatron.optimizer.main_parameters import main_parameters, present_optimizers
from areal.engine.megatron.weight_mapping import VOCABULARY, LocalParameter
from areal.engine.model.classifier import VALUE_HEAD
from areal.engine.torch.muon.updates import MatrixUpdates
from areal.engine.torch.muon.whole_matrices import Part, part_of
from areal.utils.distributed import ControlPlane

_OTHERS = {*VOCABULARY, *VALUE_HEAD}
"""Tensors of two dimensions that AdamW updates, too."""


def matrix_updates(
    chained: ChainedOptimizer,
    local_params: Iterable[LocalParameter],
    config: MuonConfig,
    control: ControlPlane,
    group: dist.ProcessGroup | None,
    like: Tensor,
) -> MatrixUpdates:
    """Return the updates of the matrices, with their momenta in the state of Megatron-Core's optimizers. Collective.

    A matrix is a Hugging Face tensor: each of several that are one parameter, and of several experts, for itself.

    Args:
        chained: Megatron-Core's AdamW over all parameters.
        local_params: parameters of this rank.
        config: settings.
        control: control plane over all ranks.
        group: process group of the same ranks; ``None`` if there is one.
        like: tensor in the dtype of the main parameters, on the device of collectives.
    """
    matrices = {each.parameter: each for each in local_params if is_matrix(each.names[0], each.parameter.shape)}
    optimizers = present_optimizers(chained)
    shards = {
        main: functools.partial(_parts, matrices[parameter], start)
        for optimizer in optimizers
        for parameter, main, start in main_parameters(optimizer)
        if parameter in matrices
    }
    updates = MatrixUpdates(shards, config, control, group, like)
    updates.start(each.optimizer for each in optimizers)
    return updates


def is_matrix(name: str, shape: Sequence[int]) -> bool:
    """Return whether a Hugging Face tensor, or a parameter of several, is updated by Muon."""
    return len(shape) == 2 and name not in _OTHERS


def _parts(local_param: LocalParameter, start: int, x: Tensor) -> Iterator[tuple[Part, Tensor]]:
    """Yield the parts of matrices in a tensor that begins at ``start`` of a flattened parameter."""
    for piece in local_param.slices(x.view(-1), start):
        yield part_of(piece.name, 0, piece.box), piece.values
