"""Adapter from Megatron-Core's schedules to the engine's: Megatron owns the loop and calls forward and loss of each micro-batch.

Pipeline stages communicate within the process groups of the engine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func, p2p_communication
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from areal.api.microbatch import MicroBatch, MicroBatchList
from areal.engine.megatron.reductions import Reductions
from areal.engine.schedule import ForwardFn, ProcessFn, Schedule
from areal.utils.profiling.phase_timer import PhaseTimer


def _start(
    *,
    tensor_send_prev: Tensor | None,
    tensor_recv_prev: Tensor | None,
    tensor_send_next: Tensor | None,
    tensor_recv_next: Tensor | None,
    group: dist.ProcessGroup,
    prev_pipeline_rank: int,
    next_pipeline_rank: int,
) -> dict[str, Any]:
    """Start sends and receives, in place of Megatron's function of the same arguments. Ranks are global."""
    starts = {
        "send_next": (dist.isend, tensor_send_next, next_pipeline_rank),
        "recv_prev": (dist.irecv, tensor_recv_prev, prev_pipeline_rank),
        "send_prev": (dist.isend, tensor_send_prev, prev_pipeline_rank),
        "recv_next": (dist.irecv, tensor_recv_next, next_pipeline_rank),
    }
    # Neighbours begin with opposite operations, because a GPU runs them one after the other.
    even = ("send_next", "recv_prev", "send_prev", "recv_next")
    odd = ("recv_prev", "send_next", "recv_next", "send_prev")
    works: dict[str, Any] = {}
    for name in odd if group.rank() % 2 else even:
        start, tensor, peer = starts[name]
        if tensor is not None:
            works[name] = start(tensor, peer, group=group)
    return works


def micro_batches_of_messages(
    table: Sequence[tuple[int, int]], stage: int, stages: int, chunks: int
) -> tuple[list[int], list[int]]:
    """Return the micro-batches whose outputs a stage receives from the previous stage, and gradients from the next, in order.

    The first stage receives from the last one the outputs of all chunks but the last, and the last stage from the first one the gradients of
    all chunks but the first.

    Args:
        table: ``(micro-batch, chunk)`` in the order of forwards. Backwards have the same order, with chunks counted from the last one.
        stage, stages: number of the stage, and of stages.
        chunks: chunks of each stage.
    """
    every, inner = [mb for mb, _ in table], [mb for mb, chunk in table if chunk < chunks - 1]
    return (every if stage > 0 else inner), (every if stage < stages - 1 else inner)


class StageCommunicator(P2PCommunicator):
    """Megatron's communicator, restricted to the group of the pipeline's stages, and without messages that announce shapes.

    Between two interleaved stages, Megatron sends in one direction over the default process group. An engine that ends by a fault aborts its
    own groups only, so that a rank would wait there for a peer that has failed.

    With micro-batches of different lengths, Megatron sends the shape of each message ahead, and the host waits for it. Here all stages have
    the same micro-batches, so that a stage knows the shapes of what it receives.

    Args:
        groups: process groups of the layout.
        config: Megatron-Core's configuration.
    """

    def __init__(self, groups: ProcessGroupCollection, config: TransformerConfig) -> None:
        super().__init__(groups.pp, config)
        self._split = groups.cp.size() * (groups.tp.size() if config.sequence_parallel else 1)
        self._from_prev: Iterator[int] = iter(())
        self._from_next: Iterator[int] = iter(())

    def expect(self, lengths: Sequence[int]) -> None:
        """Set the lengths of the micro-batches of a call, in tokens of the full stream."""
        chunks = self.virtual_pipeline_model_parallel_size or 1
        # Without chunks, micro-batches in their order.
        group = self.config.microbatch_group_size_per_vp_stage if chunks > 1 else len(lengths)
        table = get_schedule_table(len(lengths), chunks, group)
        from_prev, from_next = micro_batches_of_messages(table, self.pp_group.rank(), self.pp_group.size(), chunks)
        self._from_prev = iter([lengths[mb] for mb in from_prev])
        self._from_next = iter([lengths[mb] for mb in from_next])

    def _communicate_shapes(  # type: ignore[override]
        self, tensor_send_next: Tensor | None, tensor_send_prev: Tensor | None, recv_prev: bool, recv_next: bool
    ) -> tuple[list[int], list[int]]:
        """Return the shapes to receive from the previous and the next stage, in place of Megatron's exchange."""
        return self._shape(self._from_prev, recv_prev), self._shape(self._from_next, recv_next)

    def _shape(self, lengths: Iterator[int], receives: bool) -> list[int]:
        return [next(lengths) // self._split, 1, self.config.hidden_size] if receives else [0, 0, 0]

    # The same code, with another function under the name that it calls.
    _communicate = FunctionType(
        P2PCommunicator._communicate.__code__,
        vars(p2p_communication) | {"_p2p_ops": _start},
        argdefs=P2PCommunicator._communicate.__defaults__,
    )
    _communicate.__kwdefaults__ = P2PCommunicator._communicate.__kwdefaults__


class MegatronSchedule(Schedule):
    """Runs micro-batches through model chunks with ``get_forward_backward_func``.

    Gradients are finalized once per optimizer step, not once per call: no reduction starts within a call, unless
    :meth:`last_call` announces the optimizer step.

    Args:
        chunks: model chunks of this rank, each in Megatron's ``DistributedDataParallel``, or bare if nothing is
            trained.
        reductions: of the chunks' buckets.
        config: Megatron-Core's configuration.
        groups: process groups of the layout.
        timer: the engine's timer; a profile then shows each backward.
    """

    equal_lengths = False

    def __init__(
        self,
        chunks: list[nn.Module],
        reductions: Reductions,
        config: TransformerConfig,
        groups: ProcessGroupCollection,
        timer: PhaseTimer,
    ) -> None:
        self._chunks, self._reductions, self._timer = chunks, reductions, timer
        self._groups = groups
        self._stages, self._virtual = groups.pp.size(), config.virtual_pipeline_model_parallel_size
        self._run = get_forward_backward_func(pp_size=self._stages, vp_size=self._virtual)
        self._p2p = StageCommunicator(groups, config) if self._stages > 1 else None
        self._config = config
        # Token dispatchers keep references to the last graph, see _release_graph.
        modules = [module for chunk in chunks for module in chunk.modules()]
        self._dispatchers = [module.token_dispatcher for module in modules if hasattr(module, "token_dispatcher")]
        self._step_follows = False

    def round_up(self, n: int) -> int:
        """Round up to a multiple of the number of stages if chunks are interleaved."""
        group = self._stages if self._virtual else 1
        return -(-n // group) * group

    def grad_scale(self, n: int) -> float:
        """Return 1: Megatron divides nothing if losses are per token."""
        return 1.0

    @contextlib.contextmanager
    def last_call(self) -> Iterator[None]:
        """Context in which the optimizer step follows the next call: reductions may overlap with its last backward."""
        self._step_follows = True
        try:
            yield
        finally:
            self._step_follows = False

    def close(self) -> None:
        del self._chunks, self._reductions, self._groups, self._run, self._p2p, self._config, self._dispatchers

    def run(self, mbs: MicroBatchList, forward: ForwardFn, process: ProcessFn, *, forward_only: bool) -> dict[int, Any]:
        results: dict[int, Any] = {}
        if self._p2p is not None:
            self._p2p.expect([mb.padded_length for mb in mbs])

        def forward_step(stream: Iterator[MicroBatch], model: nn.Module) -> tuple[Any, Callable[[Any], Any]]:
            mb = next(stream)

            # Called by Megatron on the last stage only. Without tokens, it does not rescale the loss.
            def loss_func(output: Any) -> tuple[Tensor, Tensor, dict[str, Any]]:
                loss, results[mb.index] = process(output, mb)
                return torch.zeros(()) if loss is None else loss, _NO_TOKENS, {}

            return forward(model, mb), loss_func

        # One iterator per chunk: interleaved chunks see the same micro-batches at different times.
        with self._release_graph(), self._hold_reductions(forward_only), self._backward_timers(mbs):
            self._run(
                forward_step_func=forward_step,
                data_iterator=[iter(mbs) for _ in self._chunks],
                model=self._chunks,
                num_microbatches=len(mbs),
                seq_length=max(mb.padded_length for mb in mbs),
                micro_batch_size=1,
                forward_only=forward_only,
                p2p_communicator=self._p2p,
                pg_collection=self._groups,
            )
        return results

    @contextlib.contextmanager
    def _backward_timers(self, mbs: MicroBatchList) -> Iterator[None]:
        """Context in which Megatron's timers report the begin and end of each backward."""
        # Interleaved chunks visit micro-batches in another order, and several times.
        order = None if self._virtual else iter([mb.index for mb in mbs])
        self._config.timers = _BackwardTimer(self._timer, order)
        try:
            yield
        finally:
            self._config.timers = None

    @contextlib.contextmanager
    def _release_graph(self) -> Iterator[None]:
        """Context that releases the graph of the last micro-batch at its end.

        Token dispatchers keep the routing probabilities. Their graph has hooks of the model, in a cycle that
        Python's collector cannot see.
        """
        try:
            yield
        finally:
            for dispatcher in self._dispatchers:
                kept = [name for name, x in vars(dispatcher).items() if isinstance(x, Tensor) and x.grad_fn is not None]
                for name in kept:
                    setattr(dispatcher, name, None)

    @contextlib.contextmanager
    def _hold_reductions(self, forward_only: bool) -> Iterator[None]:
        """Context that delays reductions: beyond the call, or until its last micro-batch."""
        pauses = [chunk.no_sync for chunk in self._chunks if isinstance(chunk, DistributedDataParallel)]
        if forward_only or not pauses:
            yield
        # Megatron leaves no_sync itself before the last micro-batch.
        elif self._step_follows:
            self._config.no_sync_func = pauses if len(pauses) > 1 else pauses[0]  # type: ignore[assignment]
            try:
                yield
            finally:
                self._config.no_sync_func = None
            self._reductions.begin()
        else:
            # The step is not known to follow: no reduction in this call.
            with contextlib.ExitStack() as stack:
                for pause in pauses:
                    stack.enter_context(pause())
                yield


class _BackwardTimer:
    """Stub for Megatron's ``timers``, which Megatron looks up by name around each measured region.

    Args:
        timer: the engine's timer.
        order: indices of micro-batches in the order of their backwards, or ``None`` if unknown.
    """

    def __init__(self, timer: PhaseTimer, order: Iterator[int] | None) -> None:
        self._timer, self._order = timer, order
        self._running: contextlib.AbstractContextManager[None] | None = None
        self._asked = ""

    def __call__(self, name: str, log_level: int | None = None) -> _BackwardTimer:
        self._asked = name
        return self

    def start(self, barrier: bool = False) -> None:
        if self._asked == "backward-compute":
            self._running = self._timer.phase("backward", next(self._order) if self._order else None)
            self._running.__enter__()

    def stop(self, barrier: bool = False) -> None:
        if self._asked == "backward-compute" and self._running is not None:
            self._running.__exit__(None, None, None)
            self._running = None


_NO_TOKENS = torch.zeros((), dtype=torch.int)
