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
from areal.engine.lora.low_rank import Delta, Factor, LowRank, TensorParallelRanks, TensorParallelSplit
from areal.engine.lora.plan import AdapterPlan
from areal.engine.optimizer import ClippingOptimizer, GradientState, sum_of_squares, torch_optimizer
from areal.utils.seeding import mixed


@dataclass(frozen=True)
class AdapterLayout:
    """Where an engine's adapters live.

    Attributes:
        sites: the linear layers of this rank's model that may have one, by their Hugging Face names, and how each is shared.
        tp: the ranks that share layers.
        keys: the names of those that any stage has.
        replicas: the groups over which gradients are sums, one after the other; the first rank of each keeps what was summed.
        device, dtype: of the factors.
        stages: the ranks that have the other layers; ``None`` where this one has all.
    """

    sites: Mapping[str, TensorParallelSplit]
    keys: frozenset[str]
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
        self, plan: AdapterPlan, home: AdapterLayout, config: OptimizerConfig | None, spec: FinetuneSpec
    ) -> None:
        self.plan, self._home = plan, home
        self.pairs = {
            target.key: LowRank(target, home.sites[target.key], home.tp, home.device, home.dtype)
            for target in plan.targets
            if target.key in home.sites
        }
        # Gradients that are summed over tensor-parallel ranks stand first.
        self.factors = sorted(self._in_order(), key=lambda factor: not factor.summed)
        self.parameters = [factor.parameter for factor in self.factors]
        self.pending = GradientState()
        self._summed = False
        self.optimizer = self._make_optimizer(config, spec) if config else None

    def _make_optimizer(self, config: OptimizerConfig, spec: FinetuneSpec) -> ClippingOptimizer[torch.optim.Optimizer]:
        def scale(factor: float) -> None:
            torch._foreach_mul_([p.grad for p in self.parameters if p.grad is not None], factor)

        inner = torch_optimizer(self.parameters, config)
        return ClippingOptimizer(inner, config, spec.total_train_steps, self.global_norm, scale)

    def _in_order(self) -> Iterator[Factor]:
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
        return self._stream(_gradient)

    def deltas(self) -> dict[str, Delta]:
        """What it adds to the weights of layers, by their names. Collective."""
        full = dict(self.named_tensors())
        return {target.key: Delta(full[target.up], full[target.down], target.scale) for target in self.plan.targets}

    @torch.no_grad()
    def _stream(self, part: Callable[[Factor], Tensor]) -> Iterator[NamedTensor]:
        mine = {factor.name: factor for factor in self.factors}
        for name, shape in self.plan.shapes.items():
            if name in mine:
                full = mine[name].full(part(mine[name]))
            else:
                full = torch.zeros(shape, device=self._home.device, dtype=self._home.dtype)
            if self._home.stages is not None:  # as integers, so that the others' zeros change no bit
                bits = torch.int64 if full.dtype is torch.float64 else torch.int32
                dist.all_reduce(full.view(bits), group=self._home.stages)
            yield NamedTensor(name, full)

    # ---- gradients

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Sum over ranks what was added since the last time, in one piece. Collective."""
        nothing = torch.zeros(0, device=self._home.device, dtype=self._home.dtype)
        flat = torch.cat([nothing, *(_gradient(factor).flatten() for factor in self.factors)])
        for group in self._home.replicas:
            dist.all_reduce(flat, group=group)
        if self._home.tp.group is not None:
            of_summands = sum(factor.parameter.numel() for factor in self.factors if factor.summed)
            dist.all_reduce(flat[:of_summands], group=self._home.tp.group)
        for factor, total in zip(self.factors, flat.split([p.numel() for p in self.parameters]), strict=True):
            factor.parameter.grad = total.view_as(factor.parameter)
        self._summed = True

    def before_backward(self) -> None:
        """Make room for more after sums were taken: each is left on one of the ranks that hold it."""
        if self._summed:
            beside = any(dist.get_rank(group) > 0 for group in self._home.replicas)
            beside_tp = self._home.tp.group is not None and dist.get_rank(self._home.tp.group) > 0
            for factor in self.factors:
                if factor.parameter.grad is not None and (beside or (beside_tp and factor.summed)):
                    factor.parameter.grad.zero_()
        self._summed = False

    def zero_grad(self) -> None:
        """Discard gradients."""
        for parameter in self.parameters:
            parameter.grad = None
        self._summed = False

    def global_norm(self) -> Tensor:
        """L2 norm of all summed gradients, each element counted once; a float64 scalar, equal on every rank. Collective."""
        whole = [_gradient(factor) for factor in self.factors if factor.cut is None]
        cut = [_gradient(factor) for factor in self.factors if factor.cut is not None]
        squares = sum_of_squares(cut, self._home.device)
        if self._home.tp.group is not None:
            dist.all_reduce(squares, group=self._home.tp.group)
        squares = squares + sum_of_squares(whole, self._home.device)
        if self._home.stages is not None:
            dist.all_reduce(squares, group=self._home.stages)
        return squares.sqrt()

    # ---- what is saved

    def parts(self, *, with_optim: bool) -> Iterator[tuple[TensorSpec, Slice]]:
        """What this rank holds of the weights, by peft's names, and of the optimizer's moments, by these and the names of the moments."""
        for factor in self._in_order():
            held = {factor.name: factor.parameter.detach()}
            if with_optim and self.optimizer is not None:
                state = self.optimizer.inner.state.get(factor.parameter, {})
                held |= {f"{factor.name}.{key}": value for key, value in state.items()}
            for name, x in held.items():
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
            found = {name.removeprefix(prefix): x for name, x in state["moments"].items() if name.startswith(prefix)}
            if found:
                content["state"][index] = {
                    # The fused kernels go through memory as it lies.
                    key: (x[factor.box] if x.dim() else x).clone(memory_format=torch.contiguous_format)
                    for key, x in found.items()
                }
        self.optimizer.inner.load_state_dict(content)
        self.optimizer.load_state_dict(state["schedule"])


def _gradient(factor: Factor) -> Tensor:
    gradient = factor.parameter.grad
    return torch.zeros_like(factor.parameter) if gradient is None else gradient
