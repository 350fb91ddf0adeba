"""Gradients in Megatron-Core's buffers: finalized once per optimizer step, and gathered on request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from areal.engine.components import Memory
from areal.engine.megatron.optimizer.main_parameters import present_optimizers
from areal.engine.megatron.reductions import Reductions, bucket_groups
from areal.engine.optimizer import GradientState


class MegatronGradients:
    """The gradients of one engine. Implements :class:`areal.engine.components.Gradients`.

    Args:
        chunks: model chunks of this rank.
        chained: optimizer over the chunks, or ``None``.
        reductions: of the chunks' buckets.
        groups: process groups of the layout.
        memory: owner of the gradient buffers.
    """

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        chained: ChainedOptimizer | None,
        reductions: Reductions,
        groups: ProcessGroupCollection,
        memory: Memory,
    ) -> None:
        self._chunks, self._reductions, self._groups, self._memory = chunks, reductions, groups, memory
        self._chained = chained
        self.state = GradientState()

    def before_backward(self) -> None:
        if self.state.reduced:
            keep_one_copy(self._chunks, self._groups)

    def finalize(self) -> None:
        """Sum over ranks the gradients that were added since the last time."""
        finalize(self._chunks, self._reductions, self._groups)

    def zero(self) -> None:
        # Buffers cannot be replaced: bring them back from host memory to zero them.
        self._memory.onload(params=False, grads=True, optimizer=False)
        zero(self._chunks, self._reductions)
        # Where buffers are narrower than the optimizer's arithmetic, it has a copy.
        for optimizer in present_optimizers(self._chained):
            for parameter in optimizer.get_parameters():
                parameter.grad = None


def finalize(chunks: Sequence[DistributedDataParallel], reductions: Reductions, groups: ProcessGroupCollection) -> None:
    """Reduce the gradients accumulated since the last step: over replicas, tensor-parallel ranks and tied embeddings.

    Must be called once per step: with the distributed optimizer, a second reduction would add the sums of other
    ranks again.
    """
    for chunk in chunks:
        for group in bucket_groups(chunk):
            if group.param_gather_handle is not None:
                group.start_param_sync(force_sync=True)  # for parameters that no output used
            _forget_partial_batch(group)
    reductions.begin()  # no backward was marked as the last one
    finalize_model_grads(list(chunks), None, pg_collection=groups)
    reductions.forget()


def _forget_partial_batch(group: Any) -> None:
    """Let Megatron learn the parameters of a bucket from the next batch, if the first one did not reach all of them."""
    if group.is_first_batch and len(group.per_param_grad_ready_counts) < len(group.params):
        group.per_param_grad_ready_counts = {}


@torch.no_grad()
def keep_one_copy(chunks: Sequence[DistributedDataParallel], groups: ProcessGroupCollection) -> None:
    """Keep each sum of :func:`finalize` on one rank, so that further gradients can be added and reduced again."""
    for chunk in chunks:
        for group in bucket_groups(chunk):
            for bucket in group.buckets:
                _keep_own_sums(bucket.grad_data, group)
        # Sums over tensor-parallel ranks stay on the first of them.
        for name, parameter in chunk.module.named_parameters():
            if groups.tp.rank() > 0 and _is_summed_over_tp(name, parameter, chunk.config):
                parameter.main_grad.zero_()
    # Sums of a tied embedding stay on the first stage.
    if groups.embd is not None and groups.embd.rank() > 0:
        weight = chunks[-1].module.shared_embedding_or_output_weight()
        if chunks[-1].module.share_embeddings_and_output_weights and weight is not None:
            weight.main_grad.zero_()


def _keep_own_sums(data: Tensor, group: Any) -> None:
    if group.ddp_config.use_distributed_optimizer:
        # The distributed optimizer reduces to shards: only this rank's shard is a sum.
        replicas = group.intra_distributed_optimizer_instance_group
        for rank, shard in enumerate(data.chunk(replicas.size())):
            if rank != replicas.rank():
                shard.zero_()
    elif group.data_parallel_group.rank() > 0:
        data.zero_()


def _is_summed_over_tp(name: str, parameter: nn.Parameter, config: TransformerConfig) -> bool:
    """Return whether ``finalize_model_grads`` sums a gradient over tensor-parallel ranks."""
    of_own_tokens = config.sequence_parallel and getattr(parameter, "sequence_parallel", False)
    return of_own_tokens or (config.qk_layernorm and ("q_layernorm" in name or "k_layernorm" in name))


def zero(chunks: Sequence[DistributedDataParallel], reductions: Reductions) -> None:
    """Zero the gradient buffers and reset their reduction state, after an error inside of a step, too."""
    for chunk in chunks:
        for group in bucket_groups(chunk):
            _forget_partial_batch(group)
            if group.grad_reduce_handle is not None:  # with overlap only
                group.finish_grad_sync()
        for parameter in chunk.module.parameters():
            parameter.grad = None
        chunk.zero_grad_buffer()
    reductions.forget()


def gather_gradients(chunks: Sequence[DistributedDataParallel]) -> Callable[[nn.Parameter], Tensor]:
    """Return a function from parameters to their full gradients.

    Shards of the distributed optimizer are gathered to a copy. Collective.
    """
    gradients: dict[nn.Parameter, Tensor] = {}
    for chunk in chunks:
        for group in bucket_groups(chunk):
            for bucket in group.buckets:
                data = (
                    _gather_buffer(bucket.grad_data, group)
                    if chunk.ddp_config.use_distributed_optimizer
                    else bucket.grad_data
                )
                for parameter in bucket.params_list:
                    # A parameter's gradient is a view of the buffer: find its position.
                    start = parameter.main_grad.storage_offset() - bucket.grad_data.storage_offset()
                    gradients[parameter] = data[start : start + parameter.numel()].view(parameter.shape)
    return gradients.__getitem__


def _gather_buffer(data: Tensor, group: Any) -> Tensor:
    replicas = group.intra_distributed_optimizer_instance_group
    if replicas.size() == 1:
        return data
    full = torch.empty_like(data)
    dist.all_gather_into_tensor(full, data.chunk(replicas.size())[replicas.rank()].contiguous(), group=replicas)
    return full


def finish_param_gather(chunks: Sequence[DistributedDataParallel]) -> None:
    """Finish gathering the parameters that the distributed optimizer has updated.

    Collective if gathers overlap with computation.
    """
    for chunk in chunks:
        if chunk.ddp_config.overlap_param_gather:
            for group in bucket_groups(chunk):
                if group.param_gather_handle is not None or not group.param_gather_dispatched:
                    group.start_param_sync(force_sync=True)


def expect_param_gather(chunks: Sequence[DistributedDataParallel]) -> None:
    """Let parameters be gathered before their next use, since the optimizer is about to update its shards.

    Megatron does so when it reduces gradients: parameters may have been read between that and the update.
    """
    for chunk in chunks:
        if chunk.ddp_config.overlap_param_gather:
            for group in bucket_groups(chunk):
                if group.param_gather_handle is not None:
                    group.start_param_sync(force_sync=True)  # a pending gather would write to the updated shards
                group.param_gather_dispatched = False
