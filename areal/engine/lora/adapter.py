"""One adapter: its factors, their gradients over ranks, and its optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from areal.api.config import FinetuneSpec
from areal.api.memory import EngineMemory
from areal.api.sections.optimizer import OptimizerConfig
from areal.api.weights import NamedTensor
from areal.engine.checkpoint.gather_slices import Slice
from areal.engine.checkpoint.safetensors import TensorSpec
from areal.engine.lora.adapter_plan import AdapterPlan
from areal.engine.lora.low_rank import Factor, LowRank, TensorParallelRanks, TensorParallelSplit, WeightDelta
from areal.engine.optimizer import ClippingOptimizer, GradientState, sum_of_squares, torch_optimizer
from areal.utils.offload import HostMemory, expected_state_bytes, optimizer_tensors
from areal.utils.seeding import mixed


@dataclass(frozen=True)
class AdapterLayout:
    """Placement of an engine's adapters on its ranks.

    Attributes:
        layers: linear layers of this rank's model that may have an adapter, by Hugging Face name, and how each is
            split.
        layer_names: names of such layers on all pipeline stages.
        tp: tensor-parallel ranks.
        replicas: process groups over which gradients are summed, one after the other. The first rank of each keeps
            the sum.
        device, dtype: device and dtype of the factors.
        stages: process group of the pipeline stages; ``None`` without a pipeline.
    """

    layers: Mapping[str, TensorParallelSplit]
    layer_names: frozenset[str]
    tp: TensorParallelRanks
    replicas: Sequence[dist.ProcessGroup]
    device: torch.device
    dtype: torch.dtype
    stages: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class _Pending:
    """Pending gradients of an adapter before a call, and their state."""

    gradients: list[Tensor | None]
    summed: bool
    accumulated: bool
    reduced: bool


class Adapter:
    """One adapter on this rank.

    Factors are replicated over data- and context-parallel ranks: they are small, and one all-reduce is the only
    communication of a step.

    Args:
        plan: layers of the adapter.
        layout: placement on the ranks.
        config: optimizer configuration; ``None`` for an adapter that is not trained.
        spec: length of the training.

    Attributes:
        pairs: :class:`LowRank` of each adapted layer of this rank, by name.
        pending: state of the pending gradients.
    """

    def __init__(
        self, plan: AdapterPlan, layout: AdapterLayout, config: OptimizerConfig | None, spec: FinetuneSpec
    ) -> None:
        self.plan, self._layout = plan, layout
        self.pairs = {
            target.key: LowRank(target, layout.layers[target.key], layout.tp, layout.device, layout.dtype)
            for target in plan.targets
            if target.key in layout.layers
        }
        # Factors whose gradients are summed over tensor-parallel ranks come first, so that they are contiguous when
        # flattened.
        self.factors = sorted(self._factors_by_layer(), key=lambda factor: not factor.summed)
        self.parameters = [factor.parameter for factor in self.factors]
        self.pending = GradientState()
        self._summed = False
        self._before: _Pending | None = None
        self.optimizer = self._make_optimizer(config, spec) if config else None

    def _make_optimizer(self, config: OptimizerConfig, spec: FinetuneSpec) -> ClippingOptimizer[torch.optim.Optimizer]:
        def scale(factor: float) -> None:
            torch._foreach_mul_([p.grad for p in self.parameters if p.grad is not None], factor)

        inner = torch_optimizer(self.parameters, config)
        return ClippingOptimizer(inner, config, spec.total_train_steps, self.global_norm, scale)

    def _factors_by_layer(self) -> Iterator[Factor]:
        for pair in self.pairs.values():
            yield from (pair.down, pair.up)

    # ---- values

    @property
    def version(self) -> tuple[int, ...]:
        """Counts of changes: the same tuple means the same values."""
        # Fused optimizers do not count as changes of a tensor.
        steps = 0 if self.optimizer is None else self.optimizer.steps
        return (steps, *(parameter._version for parameter in self.parameters))

    def draw(self, seed: int) -> None:
        """Initialize as peft does: ``A`` uniform, ``B`` zero.

        The bound of ``A`` is ``1 / sqrt(inputs)`` (He et al., 2015, with a slope of ``sqrt(5)``).
        """
        for key, pair in self.pairs.items():
            # Seed by layer and draw the full matrix, so that values do not depend on the layout.
            generator = torch.Generator().manual_seed(mixed(seed, key))
            bound = 1 / math.sqrt(pair.target.inputs)
            full = torch.empty(pair.down.shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator)
            pair.down.fill(full)

    def fill(self, weights: Mapping[str, Tensor]) -> None:
        """Load full weights by peft's names."""
        for factor in self.factors:
            factor.fill(weights[factor.name])

    def named_tensors(self) -> Iterator[NamedTensor]:
        """Yield full weights by peft's names. Collective."""
        return self._stream(lambda factor: factor.parameter.detach())

    def named_gradients(self) -> Iterator[NamedTensor]:
        """Yield full gradients by peft's names. Collective."""
        return self._stream(_gradient_or_zeros)

    def deltas(self) -> dict[str, WeightDelta]:
        """Return the weight updates of the adapted layers, by layer name. Collective."""
        full = dict(self.named_tensors())
        return {
            target.key: WeightDelta(full[target.up], full[target.down], target.scale) for target in self.plan.targets
        }

    @torch.no_grad()
    def _stream(self, value_of: Callable[[Factor], Tensor]) -> Iterator[NamedTensor]:
        local = {factor.name: factor for factor in self.factors}
        # All ranks iterate in the order of the plan, so that collectives match.
        for name, shape in self.plan.shapes.items():
            if name in local:
                full = local[name].gather(value_of(local[name]))
            else:
                # Another pipeline stage has this layer.
                full = torch.zeros(shape, device=self._layout.device, dtype=self._layout.dtype)
            if self._layout.stages is not None:  # as integers: adding zeros changes no bit
                bits = torch.int64 if full.dtype is torch.float64 else torch.int32
                dist.all_reduce(full.view(bits), group=self._layout.stages)
            yield NamedTensor(name, full)

    # ---- gradients

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Sum gradients over ranks, in one flat buffer. Collective."""
        # The empty tensor allows a rank without adapted layers.
        nothing = torch.zeros(0, device=self._layout.device, dtype=self._layout.dtype)
        flat = torch.cat([nothing, *(_gradient_or_zeros(factor).flatten() for factor in self.factors)])
        for group in self._layout.replicas:
            dist.all_reduce(flat, group=group)
        # Only the first factors are partial sums over tensor-parallel ranks.
        if self._layout.tp.group is not None:
            n_summed = sum(factor.parameter.numel() for factor in self.factors if factor.summed)
            dist.all_reduce(flat[:n_summed], group=self._layout.tp.group)
        # Gradients become views of the summed buffer.
        for factor, total in zip(self.factors, flat.split([p.numel() for p in self.parameters]), strict=True):
            factor.parameter.grad = total.view_as(factor.parameter)
        self._summed = True

    def before_backward(self) -> None:
        """Prepare for further accumulation: keep each reduced gradient on one rank only.

        Otherwise the next all-reduce would count it once per rank.
        """
        if self._summed:
            # Rank 0 of every replica group keeps the sum; for partial sums, rank 0 of the tensor-parallel group.
            repeated = any(dist.get_rank(group) > 0 for group in self._layout.replicas)
            repeated_in_tp = self._layout.tp.group is not None and dist.get_rank(self._layout.tp.group) > 0
            for factor in self.factors:
                if factor.parameter.grad is not None and (repeated or (repeated_in_tp and factor.summed)):
                    factor.parameter.grad.zero_()
        self._summed = False

    def zero_grad(self) -> None:
        """Discard gradients."""
        for parameter in self.parameters:
            parameter.grad = None
        self._summed, self._before = False, None

    def begin_call(self) -> None:
        """Prepare for further accumulation by a call that may be undone: copy what is pending."""
        copies = [None if p.grad is None else p.grad.clone() for p in self.parameters]
        self._before = _Pending(copies, self._summed, self.pending.accumulated, self.pending.reduced)
        self.before_backward()
        self.pending.set(accumulated=self.pending.accumulated)

    def undo_call(self) -> None:
        """Restore what was pending before the call, bit for bit."""
        before = self._before
        if before is None:
            return
        for parameter, gradient in zip(self.parameters, before.gradients, strict=True):
            parameter.grad = gradient
        self._summed = before.summed
        self.pending.set(accumulated=before.accumulated, reduced=before.reduced)

    def end_call(self) -> None:
        """Release the copy of what was pending before the call."""
        self._before = None

    def global_norm(self) -> Tensor:
        """Return the L2 norm of all summed gradients, a float64 scalar that is equal on every rank.

        Each element counts once. Collective.
        """
        replicated = [_gradient_or_zeros(factor) for factor in self.factors if factor.split_dim is None]
        split = [_gradient_or_zeros(factor) for factor in self.factors if factor.split_dim is not None]
        # Split factors are summed over tensor-parallel ranks; replicated ones are added once.
        squares = sum_of_squares(split, self._layout.device)
        if self._layout.tp.group is not None:
            dist.all_reduce(squares, group=self._layout.tp.group)
        squares = squares + sum_of_squares(replicated, self._layout.device)
        if self._layout.stages is not None:
            dist.all_reduce(squares, group=self._layout.stages)
        return squares.sqrt()

    def memory(self, device: torch.device) -> EngineMemory:
        """Return the bytes of the adapter on the engine's device, where it stays: it is small."""
        inner = None if self.optimizer is None else self.optimizer.inner
        own = HostMemory(
            {
                "params": lambda: self.parameters,
                "grads": lambda: [x.grad for x in self.parameters if x.grad is not None],
                "optimizer": lambda: [] if inner is None else optimizer_tensors(inner),
            },
            expected={
                "grads": lambda: 0 if inner is None else sum(x.nbytes for x in self.parameters),
                "optimizer": lambda: 0 if inner is None else expected_state_bytes(inner),
            },
        ).report(device)
        kinds = {kind.name: getattr(own, kind.name) for kind in fields(own)}
        return EngineMemory(
            **{name: replace(kind, fixed=kind.on_device + kind.missing) for name, kind in kinds.items()}
        )

    # ---- what is saved

    def local_slices(self, *, with_optim: bool) -> Iterator[tuple[TensorSpec, Slice]]:
        """Yield this rank's slices of the weights and of the optimizer's moments.

        Weights have peft's names, moments the name of their weight and their own.
        """
        for factor in self._factors_by_layer():
            tensors = {factor.name: factor.parameter.detach()}
            if with_optim and self.optimizer is not None:
                state = self.optimizer.inner.state.get(factor.parameter, {})
                tensors |= {f"{factor.name}.{key}": value for key, value in state.items()}
            for name, x in tensors.items():
                # Scalars such as the step are the same for the full matrix.
                shape, box = (factor.shape, factor.box) if x.dim() else ((), ())
                yield TensorSpec(name, x.dtype, shape), Slice(name, box, x)

    def resume(self, state: Mapping[str, Any]) -> None:
        """Load optimizer state: ``schedule``, and full ``moments`` by name."""
        if self.optimizer is None:
            return
        content = self.optimizer.inner.state_dict()
        content["state"] = {}
        # Moments are stored by name; torch's optimizers want them by the index of the parameter.
        for index, factor in enumerate(self.factors):
            prefix = f"{factor.name}."
            moments = {name.removeprefix(prefix): x for name, x in state["moments"].items() if name.startswith(prefix)}
            if moments:
                content["state"][index] = {
                    # Fused kernels ignore strides: the slice must be contiguous.
                    key: (x[factor.box] if x.dim() else x).clone(memory_format=torch.contiguous_format)
                    for key, x in moments.items()
                }
        self.optimizer.inner.load_state_dict(content)
        # The schedule is outside the inner optimizer.
        self.optimizer.load_state_dict(state["schedule"])


def _gradient_or_zeros(factor: Factor) -> Tensor:
    gradient = factor.parameter.grad
    return torch.zeros_like(factor.parameter) if gradient is None else gradient
