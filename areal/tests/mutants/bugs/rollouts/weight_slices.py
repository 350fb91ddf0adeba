"""Bugs of weights that are sent by slices that the suite must catch, as in :mod:`areal.tests.mutants.bugs.step`."""

from __future__ import annotations

from typing import Any

from areal.tests.mutants.planting import Function, mutant
from areal.weight_sync.disk import published

SLICES = "dist/parallel/test_weight_slices.py::test_{}"


@mutant(
    "areal.weight_sync.slice_receiver:_SliceStaging.check",
    SLICES.format("update_that_does_not_fit_a_receiver_changes_none[*fsdp:d2*]"),
)
def faults_of_receivers_kept(right: Function) -> Function:
    """A receiver does not tell the trainer that an update does not fit."""

    def wrong(self: Any) -> str:
        right(self)
        return ""

    return wrong


@mutant(
    "areal.weight_sync.chain:chain_rank",
    SLICES.format("each_rank_sends_its_share_once[*fsdp:d2*]"),
)
def one_receiver_passes_everything_on(right: Function) -> Function:
    """All trainer ranks send to the same receiver first, whose card carries more than the model."""
    return lambda receiver, trainer_rank, receivers: 1 + receiver


@mutant(
    "areal.weight_sync.disk:superseded",
    "unit/weight_sync/test_weight_sync_disk.py::test_versions_stay_until_later_ones_have_all_of_their_tensors[*]",
)
def full_version_removed_before_selected_ones(right: Function) -> Function:
    """The newest versions stay, whatever tensors they have."""
    return lambda folder, keep: [path for path, _ in published(folder)[:-keep]]
