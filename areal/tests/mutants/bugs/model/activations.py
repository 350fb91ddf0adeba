"""Bugs of activation offload, with copies that happen as late as the waits allow, and of checkpointing that the suite must catch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import Tensor

from areal.tests.mutants.planting import Function, mutant

UNIT = "unit/gpu/test_saved_activations.py::"
CELLS = "dist/activations/test_activation_offload.py::"


@mutant(
    "areal.engine.torch.activations.saved_storage:SavedStorage.read",
    UNIT + "test_backward_reads_the_same_values_and_geometry[plain]",
    CELLS + "test_numbers_are_those_without_offload[none]",
)
def activations_read_before_they_arrive(right: Function) -> Function:
    """The backward reads an offloaded tensor before its copy to the device is complete."""
    return lambda self, copies: self.memory


@mutant(
    "areal.engine.torch.activations.layer_activations:LayerActivations.free",
    UNIT + "test_backward_reads_the_same_values_and_geometry[plain]",
)
def activations_freed_before_they_are_copied(right: Function) -> Function:
    """The memory on the device is free for other tensors before the copy to host memory is complete."""

    def wrong(self: Any) -> None:
        self._departure = 0
        right(self)

    return wrong


@mutant(
    "areal.engine.torch.activations.layer_activations:LayerActivations.unpack",
    UNIT + "test_backward_reads_the_same_values_and_geometry[views]",
)
def views_restored_from_the_start_of_their_storage(right: Function) -> Function:
    """A view is restored without its offset in the storage."""
    return lambda self, saved: right(self, saved if isinstance(saved, Tensor) else replace(saved, offset=0))


@mutant(
    "areal.engine.torch.activations.host_pool:HostPool.take",
    UNIT + "test_micro_batches_under_way_do_not_share_memory[*]",
    CELLS + "test_numbers_are_those_without_offload[GPipe]",
)
def host_memory_of_micro_batches_is_shared(right: Function) -> Function:
    """Host memory that a micro-batch uses is handed to another one."""

    def wrong(self: Any, sizes: Any) -> Any:
        blocks, pieces = right(self, sizes)
        self._free = [*blocks, *self._free]
        return blocks, pieces

    return wrong


@mutant(
    "areal.engine.fsdp.activation_offload:read_weights",
    CELLS + "test_gathered_weights_are_not_moved[layers]",
)
def gathered_weights_are_moved(right: Function) -> Function:
    """Weights that FSDP has gathered are moved as activations."""
    return lambda layer: iter(())


@mutant("areal.engine.fsdp.activation_offload:read_weights", CELLS + "test_gathered_weights_are_not_moved[experts]")
def gathered_experts_are_moved(right: Function) -> Function:
    """Weights of experts, which are sharded again before the forward of their layer ends, are moved as activations."""

    def wrong(layer: Any) -> Iterable[Tensor]:
        return (x.to_local() if hasattr(x, "to_local") else x for x in (*layer.parameters(), *layer.buffers()))

    return wrong


@mutant(
    "areal.engine.torch.activations.layer_activations:KnownStorages.get",
    UNIT + "test_storage_is_moved_and_restored_once",
)
def each_view_moves_its_storage(right: Function) -> Function:
    """A storage is moved once for each tensor that is a view of it."""

    def wrong(self: Any, memory: Any) -> Any:
        self._found.clear()
        return right(self, memory)

    return wrong


@mutant(
    "areal.engine.torch.activations.offload:ActivationOffload.end_call",
    CELLS + "test_error_releases_host_memory[w1-layer]",
)
def host_memory_is_kept_after_an_error(right: Function) -> Function:
    """The host memory of a call that failed is not used again while its error is alive."""
    return lambda self: None


@mutant(
    "areal.engine.attention.recomputation:is_always_recomputed",
    "unit/engine/test_activation_checkpointing.py::test_logits_of_plain_attention_are_not_kept[*]",
)
def logits_of_attention_kept(right: Function) -> Function:
    """Selective checkpointing keeps all logits of attention by plain operations."""
    return lambda: False
