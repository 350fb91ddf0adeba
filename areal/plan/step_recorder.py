"""Records a training step: collectives with their bytes, operations with their cost, and live memory by kind."""

from __future__ import annotations

import functools
import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FakeWork
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.fsdp import FSDPModule
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from areal.plan.operation_cost import operation_bytes, operation_flops
from areal.utils.dtensor import local_part
from areal.utils.releases import fsdp_param_groups

NAMES = {
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "allreduce_coalesced_": "all_reduce",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "alltoall_base_": "all_to_all",
    "exchange_rows": "all_to_all",
    "broadcast_": "broadcast",
    "send": "send",
    "recv_": "recv",
    # Of DTensor.
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_to_all_single": "all_to_all",
}
"""Operations of torch -> names of collectives."""

SHARDED = frozenset({"shards", "replicas", "expert shards"})
"""Axes whose collectives carry parameters and gradients, and overlap with the computation."""

_OF_BUFFERS = frozenset(
    {"allgather_into_tensor_coalesced_", "reduce_scatter_tensor_coalesced_", "allreduce_coalesced_"}
)
"""Operations by which Megatron-Core gathers parameters and reduces gradients, in its buffers."""

_CONTROL_PLANE = "undefined"
"""Description of groups that were made without one."""

_AXES = {"dp_shard_cp": "shards", "dp_replicate": "replicas", "edp": "expert shards", "expt_dp": "expert shards"}


class Collective(NamedTuple):
    """A kind of collective.

    Attributes:
        name: such as ``all_gather``.
        axis: ``tp``, ``cp``, ``ep``, ``pp``, ``dp``, ``all`` for all ranks, or one of :data:`SHARDED`.
        size: number of ranks.
        stride: distance between neighbouring ranks.
    """

    name: str
    axis: str
    size: int
    stride: int


@dataclass
class CollectiveCalls:
    """Number of calls of a collective on one rank, and bytes of the larger buffer of each, in total."""

    count: float = 0
    nbytes: float = 0


class StepRecorder(TorchDispatchMode):
    """Dispatch mode that records what runs inside on this rank.

    Collectives of one rank and of results of a pipeline (``broadcast``) are left out, and those of the control plane, which are on the host in
    a group without a description. Others that it cannot count raise ``RuntimeError``.

    Args:
        simulate: answer collectives and reads of values instead of running them, for tensors without values.
        seconds: function of floating point operations, bytes and the size of an element that returns the time of an operation.
        vocab_rows: rows of the output head on this rank, by which logits are recognised; 0 for none.
        experts_per_token: experts that each column of a mask of Megatron-Core's tokens selects.

    Attributes:
        collectives: by kind.
        flops, seconds: of all operations.
        peak: bytes of tensors that were created inside, by kind, at the moment of their largest sum.
    """

    def __init__(
        self,
        *,
        simulate: bool = False,
        seconds: Callable[..., float] = lambda flops, nbytes, itemsize: 0.0,
        vocab_rows: int = 0,
        experts_per_token: int = 0,
    ) -> None:
        super().__init__()
        self._simulate, self._seconds, self._vocab_rows = simulate, seconds, vocab_rows
        self._experts_per_token = experts_per_token
        self.collectives: dict[Collective, CollectiveCalls] = {}
        self.flops = 0.0
        self.seconds = 0.0
        self.peak: Counter[str] = Counter()
        self._live: Counter[str] = Counter()
        self._total = self._highest = 0
        self._storages: dict[int, tuple[str, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        if func.namespace == "c10d":
            return self._collective(func, name, args, kwargs)
        # The host reads a value, which a plan does not have: any that lets the step go on.
        if self._simulate and name == "_local_scalar_dense" and args[0].is_meta:
            return 1.0 if args[0].is_floating_point() else 1
        # The number of selected elements is that of a mask's values.
        if self._simulate and name == "masked_select" and args[0].is_meta:
            out = args[0].new_empty(args[1].shape[-1] * self._experts_per_token)
        else:
            out = func(*args, **kwargs)
        group = _group_by_name(func, args, kwargs)
        if group is not None:
            sent, received = (sum(x.nbytes for x in pytree.tree_leaves(tensors)) for tensors in (args[0], out))
            self._count(name, group, max(sent, received))
        if self._simulate and name != "exchange_rows":
            self._operation(func, args, kwargs, out)
        return out

    def watch(self, model: nn.Module, factors: Iterable[nn.Parameter] = ()) -> None:
        """Tell the gathered parameters and the gradients of an FSDP model, and of an adapter, from other tensors. In place."""
        factors = list(factors)
        self.ignore(factors)
        for factor in factors:
            factor.register_post_accumulate_grad_hook(lambda x: self._set(x.grad, "gradients"))
        for module in model.modules():
            if isinstance(module, FSDPModule):
                for group in fsdp_param_groups(module):
                    # FSDP resizes the storages of gathered parameters, which no operation shows.
                    for name in ("wait_for_unshard", "reshard", "post_backward"):
                        setattr(group, name, self._watched(getattr(group, name), group))

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Let the storages of tensors that exist count as no new memory, views of them included. In place."""
        for tensor in tensors:
            self._storages[tensor.untyped_storage()._cdata] = "held", 0

    # ---- collectives

    def _collective(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        group = next(
            dist.ProcessGroup.unbox(x)
            for x in args
            if isinstance(x, torch.ScriptObject) and str(x._type()).endswith("ProcessGroup")
        )
        buffers = [[x] if isinstance(x, Tensor) else x for x in args if isinstance(x, Tensor | list)]
        buffers = [[x for x in pytree.tree_leaves(tensors) if isinstance(x, Tensor)] for tensors in buffers]
        on_host = all(x.device.type == "cpu" for x in pytree.tree_leaves(buffers))
        if group.group_desc == _CONTROL_PLANE and on_host:
            return func(*args, **kwargs)
        of_buffers = name in _OF_BUFFERS
        self._count(name, group, max(sum(x.nbytes for x in tensors) for tensors in buffers), of_buffers=of_buffers)
        if not self._simulate:
            return func(*args, **kwargs)
        # FSDP's buffers of parameters and gradients live only for their collective.
        if not of_buffers and _axis(group) in SHARDED:
            for x in pytree.tree_leaves(buffers):
                self._set(x, "communication")
        work = FakeWork().boxed()
        return work if len(func._schema.returns) == 1 else (args[0], work)

    def _count(self, name: str, group: dist.ProcessGroup, nbytes: int, *, of_buffers: bool = False) -> None:
        """Count a collective.

        Raises:
            RuntimeError: its kind or its group is not known.
        """
        if group.size() == 1:
            return
        axis = _axis(group)
        if axis is None or name not in NAMES:
            raise RuntimeError(
                f"{name} in group {group.group_desc!r}: a plan counts collectives in NAMES of groups mesh_*, grid_* and all_ranks; add it, or "
                "name the group by group_desc"
            )
        if of_buffers:
            axis = "expert shards" if axis == "expert shards" else "shards"
        if NAMES[name] == "broadcast":
            return
        ranks = dist.get_process_group_ranks(group)
        calls = self.collectives.setdefault(
            Collective(NAMES[name], axis, len(ranks), ranks[1] - ranks[0]), CollectiveCalls()
        )
        calls.count += 1
        calls.nbytes += nbytes

    # ---- operations and memory

    def _operation(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        created = [x for x in pytree.tree_leaves(out) if isinstance(x, Tensor) and x.is_meta]
        for tensor in created:
            tensor = local_part(tensor)
            # Logits are in at least float32, one column for each row of the head.
            wide = tensor.dim() == 2 and tensor.shape[1] == self._vocab_rows and tensor.dtype.itemsize >= 4
            if tensor.untyped_storage()._cdata not in self._storages:
                self._set(tensor, "logits" if wide else "activations")
        # A tensor that is set to memory which exists is a view of it.
        if not created or func.is_view or func.overloadpacket is torch.ops.aten.set_:
            return
        flops = operation_flops(func, args, kwargs, out)
        self.flops += flops
        self.seconds += self._seconds(
            flops, operation_bytes(func, args, kwargs, created), itemsize=created[0].element_size()
        )

    def _set(self, tensor: Tensor, kind: str) -> None:
        """Record the kind of a tensor's storage, and its bytes, which may have changed."""
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if key not in self._storages:
            weakref.finalize(storage, self._forget, key).atexit = False
        else:
            self._forget(key)
        self._storages[key] = kind, nbytes
        self._live[kind] += nbytes
        self._total += nbytes
        if self._total > self._highest:
            self._highest, self.peak = self._total, self._live.copy()

    def _forget(self, key: int) -> None:
        kind, nbytes = self._storages.pop(key, ("", 0))
        self._live[kind] -= nbytes
        self._total -= nbytes

    def _watched(self, inner: Callable[..., Any], group: Any) -> Callable[..., Any]:
        @functools.wraps(inner)
        def watched(*args: Any, **options: Any) -> Any:
            self._sort(group.fsdp_params)
            result = inner(*args, **options)
            self._sort(group.fsdp_params)
            return result

        return watched

    def _sort(self, parameters: Iterable[Any]) -> None:
        """Record gathered parameters and gradients as such."""
        for parameter in parameters:
            for gathered in parameter.all_gather_outputs:
                self._set(gathered, "communication")
            unsharded = getattr(parameter, "_unsharded_param", None)
            accumulated = getattr(parameter, "unsharded_accumulated_grad", None)
            shard = parameter.sharded_param
            for gradient in (None if unsharded is None else unsharded.grad, accumulated, shard.grad):
                if gradient is not None:
                    self._set(local_part(gradient), "gradients")


def _group_by_name(func: Any, args: Any, kwargs: Any) -> dist.ProcessGroup | None:
    """Return the group of a collective whose argument is the group's name: ours, and those of DTensor. ``None`` for other operations."""
    if func.namespace not in ("areal", "_c10d_functional"):
        return None
    given = {argument.name: x for argument, x in zip(func._schema.arguments, args, strict=False)} | kwargs
    name = given.get("group") or given.get("group_name")
    return None if name is None else _resolve_process_group(name)


def _axis(group: dist.ProcessGroup) -> str | None:
    """Return the axis of the device mesh, or of Megatron's grid, that a group belongs to; ``all`` for the group of all ranks.

    ``None`` for other groups.
    """
    named = re.fullmatch(r"(?:mesh|grid)_([a-z_+]+?)(_\d+)?|(all)_ranks", group.group_desc)
    if named is None:
        return None
    axis: str = named[1] or named[3]
    return _AXES.get(axis, axis)
