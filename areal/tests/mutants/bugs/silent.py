"""Bugs after which a mistake of the user trains on without a word, as in :mod:`areal.tests.mutants.bugs.step`."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from areal.tests.mutants.planting import Function, mutant

TESTS = "dist/faults/test_silent_mistakes.py::"
SETTINGS = "dist/faults/test_unequal_settings.py::"
IMAGES = TESTS + "test_model_that_takes_images_"


@mutant(
    "areal.engine.step_sync:StepSync._check_divided",
    TESTS + "test_one_batch_on_all_data_parallel_ranks_is_refused[fsdp:d2]",
)
def batches_of_shards_not_compared(right: Function) -> Function:
    """A batch that every data-parallel rank passes is counted several times."""
    return lambda self, counts, digests: None


@mutant(
    "areal.api.parallel:ParallelDims.coordinates",
    "unit/engine/test_layout_table.py::test_coordinates_are_those_of_the_mesh[p2d3t2]",
)
def coordinates_in_another_order(right: Function) -> Function:
    """The data-parallel coordinate changes fastest over ranks."""

    def wrong(self: Any, rank: int) -> dict[str, int]:
        places: dict[str, int] = {}
        for axis, degree in (("dp", self.dp), ("cp", self.cp), ("tp", self.tp), ("pp", self.pp)):
            rank, places[axis] = divmod(rank, degree)
        return places

    return wrong


@mutant("areal.engine.loss_call:_compare", TESTS + "test_loss_that_is_a_mean_is_named_once[fsdp:d1]")
def mean_losses_not_named(right: Function) -> Function:
    """A loss that is a mean is trained with, without a word."""
    return lambda loss_fn, name, whole, parts: None


@mutant(
    "areal.engine.batch_rules:ContextCheck.check",
    TESTS + "test_sequence_beyond_the_context_is_named_once[fsdp:d1]",
)
def context_not_compared(right: Function) -> Function:
    """Sequences longer than the model's context are trained on, without a word."""
    return lambda self, longest, positions, in_table, speaks: None


@mutant("areal.engine.model.media:check_media", IMAGES + "is_refused_by_name[w1-fsdp]")
def images_are_ignored(right: Function) -> Function:
    """A model that takes images is trained on text, although nobody has said so."""
    return lambda config, text_only, freeze_vision=False: None


@mutant("areal.engine.model.media:media_tokens", IMAGES + "trains_on_text_alone_if_asked[w1]")
def placeholders_are_tokens(right: Function) -> Function:
    """A token that stands for an image is trained on as text."""
    return lambda config, images: frozenset()


@mutant(
    "areal.engine.optimizer:ClippingOptimizer.load_state_dict",
    TESTS + "test_settings_that_changed_before_a_resume_take_effect_and_are_named[fsdp:d1]",
)
def learning_rate_of_the_checkpoint(right: Function) -> Function:
    """A run that resumes with another learning rate keeps that of the checkpoint."""
    return lambda self, state: right(self, {name: state[name] for name in ("steps", "base_lr")})


@mutant(
    "areal.engine.optimizer:ClippingOptimizer._warn_of_end",
    "unit/engine/test_lr_schedule.py::test_steps_after_the_schedule_are_named_once[linear-0.0-1]",
)
def end_of_the_schedule_not_named(right: Function) -> Function:
    """Steps after the schedule, which change nothing, are taken without a word."""
    return lambda self: None


@mutant(
    "areal.utils.data.loader:ShardedLoader.load_state_dict",
    "unit/data/test_loader.py::test_another_data_set_is_refused",
)
def loader_of_another_data_set(right: Function) -> Function:
    """A loader continues in the middle of an epoch of another data set."""
    return lambda self, state: right(self, {name: state[name] for name in ("seed", "epoch", "cursor")})


@mutant(
    "areal.trainer.rollout.plan:Plan.check_order",
    "unit/rollout/test_restore.py::test_another_order_of_groups_is_refused[*groups = 2*]",
)
def order_of_groups_not_compared(right: Function) -> Function:
    """A run continues with another number of items or groups, so that groups are repeated or left out."""
    return lambda self, n_items, saved: None


@mutant(
    "areal.trainer.rollout.weights_check:WeightsCheck.__call__",
    "dist/trainer/test_empty_ranks.py::test_sync_that_only_names_the_version_ends_the_run[w2]",
)
def rollout_weights_not_compared(right: Function) -> Function:
    """A run goes on whose rollout keeps its first weights under each new version."""
    return lambda self, scalars, excluded=bool: None


@mutant("areal.engine.agreement:check_equal", SETTINGS + "test_ranks_with_other_settings_are_told[fsdp:d2]")
def settings_of_ranks_are_not_compared(right: Function) -> Function:
    """Ranks with other learning rates train together."""
    return lambda of_all, way_out: None


@mutant(
    "areal.engine.checkpoint.checkpointer:_published",
    SETTINGS + "test_ranks_that_mean_other_checkpoints_are_told[fsdp:d2]",
)
def checkpoints_of_ranks_are_not_compared(right: Function) -> Function:
    """Each rank loads the checkpoint that its host sees."""
    return lambda meta: {}


@mutant(
    "areal.engine.loss_step:_returned",
    "unit/losses/test_loss_step.py::test_outputs_are_returned_as_before_the_loss[True]",
)
def returned_outputs_are_those_of_the_loss(right: Function) -> Function:
    """Outputs that a call returns have the changes that the loss has made in place."""
    return lambda name, output: pytree.tree_map(torch.Tensor.detach, output)


@mutant(
    "areal.engine.checkpoint.atomic_dir:prune",
    "unit/engine/checkpoint/test_atomic_dir.py::test_retention_keeps_the_source",
)
def source_of_the_engine_is_removed(right: Function) -> Function:
    """``keep_last`` removes the checkpoint from which every save copies the tokenizer."""
    return lambda folder, keep, *, source=None: right(folder, keep)


@mutant(
    "areal.recipes.data.rows:_content",
    "unit/recipes/test_rows.py::test_fingerprints_of_pictures_and_arrays_are_those_of_their_contents",
)
def picture_is_known_by_its_address(right: Function) -> Function:
    """The fingerprint of a picture is another one in each process."""
    return str
