"""One adapter: its factors, their gradients over ranks, and its optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from areal.api.config import FinetuneSpec, OptimizerConfig
from areal.api.weights import NamedTensor
from areal.engine.checkpoint.gather_slices import Slice
from areal.engine.checkpoint.safetensors import TensorSpec
from areal.engine.lora.low_rank import Factor, LowRank, TensorParallelRanks, TensorParallelSplit, WeightDelta
from areal.engine.lora.plan import AdapterPlan
from areal.engine.optimizer import ClippingOptimizer, GradientState, sum_of_squares, torch_optimizer
from areal.utils.seeding import mixed


@dataclass(frozen=True)
class AdapterLayout:
    """Where an engine's adapters live.

    Attributes:
        layers: the linear layers of this rank's model that may have one, by their Hugging Face names, and how each is shared.
        tp: the ranks that share layers.
        layer_names: the names of those that any stage has.
        replicas: the groups over which gradients are sums, one after the other; the first rank of each keeps what was summed.
        device, dtype: of the factors.
        stages: the ranks that have the other layers; ``None`` where this one has all.
    """

    layers: Mapping[str, TensorParallelSplit]
    layer_names: frozenset[str]
    tp: TensorParallelRanks
    replicas: Sequence[dist.ProcessGroup]
    device: torch.device
    dtype: torch.dtype
    stages: dist.ProcessGroup | None = None


class Adapter:
    """One adapter on this rank. Factors are replicated over data- and context-parallel ranks: they are small, and one sum over all of them is
    the only communication of a step.

    Args:
        config: ``None`` for an adapter that only computes. spec: of its training.

    Attributes:
        pairs: by the name of the layer. pending: of its gradients.
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
        # Gradients that are summed over tensor-parallel ranks stand first.
        self.factors = sorted(self._factors_by_layer(), key=lambda factor: not factor.summed)
        self.parameters = [factor.parameter for factor in self.factors]
        self.pending = GradientState()
        self._summed = False
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

    def draw(self, seed: int) -> None:
        """Begin as peft's do: ``A`` uniform within ``1 / sqrt(inputs)`` (He et al., 2015, with a slope of ``sqrt(5)``), ``B`` zero."""
        for key, pair in self.pairs.items():
            generator = torch.Generator().manual_seed(mixed(seed, key))
            bound = 1 / math.sqrt(pair.target.inputs)
            full = torch.empty(pair.down.shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator)
            pair.down.fill(full)

    def fill(self, weights: Mapping[str, Tensor]) -> None:
        """Take full weights by peft's names."""
        for factor in self.factors:
            factor.fill(weights[factor.name])

    def named_tensors(self) -> Iterator[NamedTensor]:
        """Full weights, likewise. Collective."""
        return self._stream(lambda factor: factor.parameter.detach())

    def named_gradients(self) -> Iterator[NamedTensor]:
        """Full gradients, likewise. Collective."""
        return self._stream(_gradient_or_zeros)

    def deltas(self) -> dict[str, WeightDelta]:
        """What it adds to the weights of layers, by their names. Collective."""
        full = dict(self.named_tensors())
        return {
            target.key: WeightDelta(full[target.up], full[target.down], target.scale) for target in self.plan.targets
        }

    @torch.no_grad()
    def _stream(self, value_of: Callable[[Factor], Tensor]) -> Iterator[NamedTensor]:
        local = {factor.name: factor for factor in self.factors}
        for name, shape in self.plan.shapes.items():
            if name in local:
                full = local[name].gather(value_of(local[name]))
            else:
                full = torch.zeros(shape, device=self._layout.device, dtype=self._layout.dtype)
            if self._layout.stages is not None:  # as integers, so that the others' zeros change no bit
                bits = torch.int64 if full.dtype is torch.float64 else torch.int32
                dist.all_reduce(full.view(bits), group=self._layout.stages)
            yield NamedTensor(name, full)

    # ---- gradients

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Sum over ranks what was added since the last time, in one piece. Collective."""
        nothing = torch.zeros(0, device=self._layout.device, dtype=self._layout.dtype)
        flat = torch.cat([nothing, *(_gradient_or_zeros(factor).flatten() for factor in self.factors)])
        for group in self._layout.replicas:
            dist.all_reduce(flat, group=group)
        if self._layout.tp.group is not None:
            n_summed = sum(factor.parameter.numel() for factor in self.factors if factor.summed)
            dist.all_reduce(flat[:n_summed], group=self._layout.tp.group)
        for factor, total in zip(self.factors, flat.split([p.numel() for p in self.parameters]), strict=True):
            factor.parameter.grad = total.view_as(factor.parameter)
        self._summed = True

    def before_backward(self) -> None:
        """Make room for more after sums were taken: each is left on one of the ranks that hold it."""
        if self._summed:
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
        self._summed = False

    def global_norm(self) -> Tensor:
        """L2 norm of all summed gradients, each element counted once; a float64 scalar, equal on every rank. Collective."""
        replicated = [_gradient_or_zeros(factor) for factor in self.factors if factor.split_dim is None]
        split = [_gradient_or_zeros(factor) for factor in self.factors if factor.split_dim is not None]
        squares = sum_of_squares(split, self._layout.device)
        if self._layout.tp.group is not None:
            dist.all_reduce(squares, group=self._layout.tp.group)
        squares = squares + sum_of_squares(replicated, self._layout.device)
        if self._layout.stages is not None:
            dist.all_reduce(squares, group=self._layout.stages)
        return squares.sqrt()

    # ---- what is saved

    def local_slices(self, *, with_optim: bool) -> Iterator[tuple[TensorSpec, Slice]]:
        """What this rank holds of the weights, by peft's names, and of the optimizer's moments, by these and the names of the moments."""
        for factor in self._factors_by_layer():
            tensors = {factor.name: factor.parameter.detach()}
            if with_optim and self.optimizer is not None:
                state = self.optimizer.inner.state.get(factor.parameter, {})
                tensors |= {f"{factor.name}.{key}": value for key, value in state.items()}
            for name, x in tensors.items():
                shape, box = (factor.shape, factor.box) if x.dim() else ((), ())
                yield TensorSpec(name, x.dtype, shape), Slice(name, box, x)

    def resume(self, state: Mapping[str, Any]) -> None:
        """Take optimizer state: ``schedule``, and full ``moments`` by their names."""
        if self.optimizer is None:
            return
        content = self.optimizer.inner.state_dict()
        content["state"] = {}
        for index, factor in enumerate(self.factors):
            prefix = f"{factor.name}."
            moments = {name.removeprefix(prefix): x for name, x in state["moments"].items() if name.startswith(prefix)}
            if moments:
                content["state"][index] = {
                    # The fused kernels go through memory as it lies.
                    key: (x[factor.box] if x.dim() else x).clone(memory_format=torch.contiguous_format)
                    for key, x in moments.items()
                }
        self.optimizer.inner.load_state_dict(content)
        self.optimizer.load_state_dict(state["schedule"])


def _gradient_or_zeros(factor: Factor) -> Tensor:
    gradient = factor.parameter.grad
    return torch.zeros_like(factor.parameter) if gradient is None else gradient
