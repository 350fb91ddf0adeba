"""Bugs of weights that reach servers without files that the suite must catch, as in :mod:`areal.tests.mutants.bugs.step`."""

from __future__ import annotations

from typing import Any

from areal.tests.mutants.planting import Function, mutant

HANDLES = "dist/weights/test_weights_by_handles.py::test_{}"


@mutant(
    "areal.inference.http.group.sender:GroupSender.start_round",
    HANDLES.format("memory_is_filled_again_after_it_was_loaded[*fsdp:d1*]"),
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
    HANDLES.format("each_worker_loads_from_the_memory_of_its_gpu[*fsdp:d1*30000*]"),
)
def memory_of_chunks_kept(right: Function) -> Function:
    """Memory that servers on the same GPU need stays allocated after an update."""

    def wrong(self: Any) -> None:
        if not hasattr(self, "_buffers"):
            right(self)

    return wrong
