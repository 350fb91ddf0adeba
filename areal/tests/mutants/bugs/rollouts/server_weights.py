"""Bugs of weights that reach servers without files that the suite must catch, as in :mod:`areal.tests.mutants.bugs.step`."""

from __future__ import annotations

from typing import Any

from areal.engine.checkpoint.atomic_dir import prune
from areal.tests.mutants.planting import Function, mutant

HANDLES = "dist/weights/test_weights_by_handles.py::test_{}"


@mutant(
    "areal.inference.http.group.sender:GroupSender.start_round",
    HANDLES.format("memory_is_filled_again_after_it_was_loaded[*d1]"),
)
def memory_filled_while_it_is_loaded(right: Function) -> Function:
    """The next chunk is announced while a server may still load the last one, whose memory is then filled."""

    def wrong(self: Any, *arguments: Any) -> None:
        last, self._round = self._round, None
        right(self, *arguments)
        self._rounds = [*getattr(self, "_rounds", []), last]

    return wrong


@mutant(
    "areal.inference.http.group.chunk:ChunkMemory.release",
    HANDLES.format("each_worker_loads_from_the_memory_of_its_gpu[*d1*30000*]"),
)
def memory_of_chunks_kept(right: Function) -> Function:
    """Memory that servers on the same GPU need stays allocated after an update."""

    def wrong(self: Any) -> None:
        if not hasattr(self, "_buffers"):
            right(self)

    return wrong


PLAN = "unit/inference/group/test_reshard_plan.py::test_{}"
SHARDS = "dist/weights/test_shards_to_servers.py::test_{}"


@mutant(
    "areal.inference.http.group.reshard_plan:ReshardPlan.senders",
    PLAN.format("more_ranks_than_blocks[64-4]"),
)
def first_neighbour_sends_to_all_servers(right: Function) -> Function:
    """Of the ranks with the same block, the first one sends it to every server."""
    return lambda self, server: right(self, 0)


@mutant("areal.inference.http.group.boxes:join_boxes", PLAN.format("neighbouring_parts_of_a_rank_are_one"))
def gaps_between_parts_joined(right: Function) -> Function:
    """Parts of a rank count as one although others lie between them."""

    def wrong(boxes: Any) -> Any:
        joined = right(boxes)
        if joined is None and boxes:
            return right(boxes[:1])
        return joined

    return wrong


@mutant(
    "areal.inference.http.group.reshard_plan:_orders",
    PLAN.format("blocks_are_in_the_order_of_the_ranks_shards"),
)
def blocks_in_the_order_of_the_ranks(right: Function) -> Function:
    """The first rank sends the first block, whatever the ranks have."""
    return lambda tensors, ranks: [tuple(range(ranks))]


@mutant(
    "areal.inference.http.group.reshard_sender:ReshardSender.invite",
    SHARDS.format("groups_are_made_again_for_another_source_or_server[*d1]"),
)
def plan_of_the_first_source_kept(right: Function) -> Function:
    """Servers keep the plan of the first source, whatever the next one has."""
    return lambda self, plan: right(self, self._plan or plan)


@mutant(
    "areal.inference.http.group.reshard_plan:_Layout.dimensions",
    PLAN.format("rows_of_what_all_ranks_have_are_divided_among_them"),
)
def every_rank_sends_everything(right: Function) -> Function:
    """Each rank sends the full tensors, and not its blocks."""
    return lambda self, blocks: [None]


GROUPS = "unit/inference/group/test_group_updates.py::test_{}"


@mutant(
    "areal.inference.http.group.sender:GroupSender._end_interrupted",
    GROUPS.format("ctrl_c_in_an_update_leaves_no_server_paused[commit-*]"),
)
def interrupted_commit_left_alone(right: Function) -> Function:
    """Servers stay paused after Ctrl-C in the commit of an update."""
    return lambda self: None


@mutant(
    "areal.inference.http.updates:WeightUpdates._load_last",
    "unit/inference/http/test_server_updates.py::test_version_before_is_loaded_again_after_a_failed_load",
)
def versions_removed_before_the_load(right: Function) -> Function:
    """The version that servers go on with after a failed load is removed before that load."""

    def wrong(self: Any, path: Any, version: int) -> None:
        prune(path.parent, 1)
        right(self, path, version)

    return wrong
