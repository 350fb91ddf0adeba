"""Stand-ins for Transformer Engine, which is installed only with CUDA: its optimizer, and the attributes that it sets."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor


class FusedAdam(torch.optim.Optimizer):
    """``transformer_engine.pytorch.optimizers.FusedAdam`` from release 2.1 on, in Python.

    As in Transformer Engine, ``step`` is in the parameter group, which lacks it before the first step, and moments may be bf16.
    With ``master_weights`` the optimizer keeps float32 weights: in full, or with ``store_param_remainders`` the 16 bits that a bf16
    parameter lacks.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        adam_w_mode: bool = True,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        assert adam_w_mode
        assert master_weight_dtype == torch.float32
        self.master_weights = master_weights
        self.use_decoupled_grad = use_decoupled_grad
        self.store_param_remainders = store_param_remainders and master_weights
        self.name_to_dtype_map = {
            "exp_avg": exp_avg_dtype,
            "exp_avg_sq": exp_avg_sq_dtype,
            "master_param": torch.float32,
        }

    def initialize_state(self, param: Tensor, store_param_remainders: bool) -> None:
        for name in ("exp_avg", "exp_avg_sq"):
            self.state[param][name] = torch.zeros_like(param, dtype=self.name_to_dtype_map[name])
        if self.master_weights and store_param_remainders:
            self.state[param]["master_param"] = torch.zeros_like(param, dtype=torch.int16)
        elif self.master_weights:
            self.state[param]["master_param"] = param.detach().float().clone()

    def get_unscaled_state(self, param: Tensor, state_name: str) -> Tensor:
        value = self.state[param][state_name]
        return value.float() if value.dtype == torch.bfloat16 else value

    def set_scaled_state(self, param: Tensor, state_name: str, unscaled_state: Tensor) -> None:
        remainders = self.store_param_remainders and state_name == "master_param" and param.dtype == torch.bfloat16
        assert unscaled_state.dtype == (torch.int16 if remainders else torch.float32)
        self.state[param][state_name].copy_(unscaled_state)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group["step"] + 1 if "step" in group else 1
            for param in group["params"]:
                if len(self.state[param]) == 0:
                    self.initialize_state(param, self.store_param_remainders and param.dtype == torch.bfloat16)
                grad = getattr(param, "decoupled_grad", None) if self.use_decoupled_grad else param.grad
                if grad is not None:
                    self._update(param, grad.float(), group)

    def _update(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        exp_avg, exp_avg_sq = (self.get_unscaled_state(param, name) for name in ("exp_avg", "exp_avg_sq"))
        exp_avg.lerp_(grad, 1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        mean, square = exp_avg / (1 - beta1 ** group["step"]), exp_avg_sq / (1 - beta2 ** group["step"])
        weight = self._main(param)
        weight.sub_(group["lr"] * (mean / (square.sqrt() + group["eps"]) + group["weight_decay"] * weight))
        for name, value in (("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
            self.set_scaled_state(param, name, value)
        self._store(param, weight)

    def _main(self, param: Tensor) -> Tensor:
        # Float32 parameters are updated in place, also where a main parameter exists.
        if param.dtype == torch.float32 or not self.master_weights:
            return param
        main = self.state[param]["master_param"]
        if main.dtype == torch.float32:
            return main
        # Parameters were rounded upwards where the remainder is negative.
        high = param.view(torch.int16).int() - (main < 0).int()
        return ((high << 16) | (main.int() & 0xFFFF)).view(torch.float32)

    def _store(self, param: Tensor, weight: Tensor) -> None:
        if weight is param:
            return
        main = self.state[param]["master_param"]
        if main.dtype == torch.float32:
            param.copy_(weight)
            return
        bits = weight.view(torch.int32)
        main.copy_(bits.to(torch.int16))
        param.view(torch.int16).copy_((bits >> 16) + (main < 0).int())


class FusedAdamBefore21(FusedAdam):
    """The optimizer before release 2.1, without ``store_param_remainders``."""

    __signature__ = inspect.signature(FusedAdam)  # Megatron-Core looks for the names of the other options

    def __init__(self, params: Any, **options: Any) -> None:
        options.pop("store_param_remainders", None)
        super().__init__(params, **options)

    def initialize_state(self, param: Tensor) -> None:  # type: ignore[override]
        super().initialize_state(param, False)

    def step(self, closure: Any = None) -> None:
        for param in (param for group in self.param_groups for param in group["params"]):
            if len(self.state[param]) == 0:
                self.initialize_state(param)
        super().step(closure)


@contextmanager
def fused_adam(kind: type[FusedAdam] = FusedAdam) -> Iterator[None]:
    """Make Megatron-Core and the engine find Transformer Engine's optimizer, as on a GPU. Layers stay local ones."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer, optimizer_config

    from areal.engine.megatron.optimizer import chained as ours

    new = kind is FusedAdam
    optimizers = ModuleType("transformer_engine.pytorch.optimizers")
    optimizers.FusedAdam = kind  # type: ignore[attr-defined]
    modules = {name: ModuleType(name) for name in ("transformer_engine", "transformer_engine.pytorch")} | {
        optimizers.__name__: optimizers
    }
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(sys.modules, modules))
        stack.enter_context(mock.patch.multiple(optimizer, Adam=kind, USING_PYTORCH_OPTIMIZER=False))
        stack.enter_context(
            mock.patch.multiple(distrib_optimizer, Adam=kind, HAVE_APEX_OR_TE=True, USING_TE_OPTIMIZER=True)
        )
        for module in (optimizer, optimizer_config):
            stack.enter_context(mock.patch.object(module, "is_te_min_version", return_value=new))
        stack.enter_context(mock.patch.object(ours, "has_transformer_engine", return_value=True))
        yield


@contextmanager
def marked_as_split() -> Iterator[None]:
    """Mark the weights of replicated layers as split over tensor-parallel ranks.

    Transformer Engine's ``Linear`` marks every weight, also where its ``parallel_mode`` is ``None``.
    """
    from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes

    from areal.engine.megatron.model.layer_spec import ReplicatedLinear

    original = ReplicatedLinear.__init__

    def init(self: ReplicatedLinear, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    with mock.patch.object(ReplicatedLinear, "__init__", init):
        yield
