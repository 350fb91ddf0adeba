"""Bugs of samples that are taken by reference that the suite must catch, as in :mod:`areal.tests.mutants.bugs.step`."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

from areal.dispatch.stored_samples import StoredSample
from areal.tests.mutants.planting import Function, mutant

STORED = "unit/dispatch/test_stored_samples.py::test_"
_PPO = f"{STORED}batch_and_scores_of_a_ppo_step_travel_once"


@mutant("areal.dispatch.stored_samples:StoredSample.__or__", _PPO)
def copies_forget_the_store(right: Function) -> Function:
    """A sample with a further key is sent as a whole."""
    return lambda self, other: {**self, **other}


@mutant("areal.dispatch.stored_samples:keep_results", _PPO)
def results_return_to_the_ranks(right: Function) -> Function:
    """Log-probs and values are sent to the ranks, which have computed them."""
    return lambda batch, indices, handles, result, call: None


@mutant("areal.trainer.ppo:PPOTrainer._put", _PPO)
def trainer_puts_nothing(right: Function) -> Function:
    """Each model and each update receives the batch."""
    return lambda self, samples: samples


@mutant("areal.dispatch.stored_samples:_version", f"{STORED}only_new_and_changed_tensors_are_put")
def changes_in_place_are_not_noticed(right: Function) -> Function:
    """The ranks read the numbers that a tensor had when it was stored."""
    return lambda x: 0


@mutant("areal.dispatch.stored_samples:StoredSample.place_of", f"{STORED}results_are_read_where_they_are*")
def results_of_lost_processes_are_read(right: Function) -> Function:
    """A result that may have ended with its node is not sent."""

    def wrong(self: Any, value: Any, executor: Any) -> Any:
        place = self.places.get(id(value))
        return place if place is not None and place.tensor() is value else right(self, value, executor)

    return wrong


@mutant("areal.dispatch.stored_samples:StoredSample.keep", f"{STORED}store_is_freed_with_the_samples")
def results_of_all_calls_are_kept(right: Function) -> Function:
    """Samples that are scored again and again refer to each result."""

    def wrong(self: Any, value: Any, **place: Any) -> None:
        more = StoredSample({**self, **dict.fromkeys(map(str, range(1000)))}, self.places)
        right(more, value, **place)

    return wrong


@mutant("areal.dispatch.stored_samples:StoredShard.get", f"{STORED}only_new_and_changed_tensors_are_put", _PPO)
def rows_of_a_piece_in_their_order(right: Function) -> Function:
    """A shard has the first rows of each piece, whichever samples it has."""

    def wrong(self: Any) -> Any:
        keys, pieces = pickle.loads(self.plan)
        pieces = [(*which, positions, [*range(len(rows))]) for *which, positions, rows in pieces]
        return right(dataclasses.replace(self, plan=pickle.dumps((keys, pieces))))

    return wrong
