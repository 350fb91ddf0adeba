"""AdamW with moments in bfloat16: half of their memory, with stochastic rounding that is unbiased."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from areal.utils.dtensor import empty_like, local_part, local_shard
from areal.utils.seeding import mixed

_MOMENTS = ("exp_avg", "exp_avg_sq")


class BFloat16AdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter, 2019) with bfloat16 moments that are rounded stochastically.

    An update changes a moment by a small fraction, often less than half a unit in bfloat16's last place: rounding to nearest
    would never change it. Rounding up with a probability equal to the remainder (in units of the last place) gives the right
    result on average (Gupta et al., 2015). The noise depends on ``seed``, the step, the parameter's name and the box of the
    shard. So ranks with the same shard round in the same way, and a resumed run continues with the same noise.

    Args:
        parameters: plain or distributed tensors. Each is updated in its own dtype; arithmetic is in float32.
        lr, betas, eps, weight_decay: as in ``torch.optim.AdamW``.
        seed: seed of the noise.
        names: names of the parameters. Defaults to their positions.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        seed: int = 0,
        names: Sequence[str] | None = None,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._seed, self._names = seed, names

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        numbered = ((group, p) for group in self.param_groups for p in group["params"])
        for number, (group, parameter) in enumerate(numbered):
            if parameter.grad is not None:
                self._update(parameter, group, number)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state. Moments stay bfloat16."""
        # torch casts state to the dtype of the parameter.
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state |= {name: state[name].bfloat16() for name in _MOMENTS}

    def _update(self, parameter: nn.Parameter, group: dict[str, Any], number: int) -> None:
        state, name = self.state[parameter], self._names[number] if self._names else number
        # Moments start at zero, sharded like the parameter.
        if not state:
            state["step"] = torch.zeros(())
            for moment in _MOMENTS:
                state[moment] = empty_like(parameter, dtype=torch.bfloat16)
                local_part(state[moment]).zero_()
        state["step"] += 1
        step, (beta1, beta2) = int(state["step"]), group["betas"]
        weight, box = local_shard(parameter)
        bounds = [(s.start, s.stop) for s in box]
        # New moments in float32: m = beta1 m + (1 - beta1) g, v = beta2 v + (1 - beta2) g^2.
        gradient = local_part(parameter.grad).float()  # type: ignore[arg-type]  # there is one
        first = local_part(state["exp_avg"]).float().lerp_(gradient, 1 - beta1)
        second = local_part(state["exp_avg_sq"]).float().mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        # Store them rounded. The update below uses the values before rounding.
        generator = torch.Generator(weight.device).manual_seed(mixed(self._seed, name, step, bounds))
        _round(local_part(state["exp_avg"]), first, generator)
        _round(local_part(state["exp_avg_sq"]), second, generator)
        # Decoupled weight decay, then the step with bias correction.
        second.div_(1 - beta2**step).sqrt_().add_(group["eps"])
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.sub_(first.div_(second).mul_(group["lr"] / (1 - beta1**step)))


def _round(out: Tensor, value: Tensor, generator: torch.Generator) -> None:
    """Round float32 ``value`` stochastically to bfloat16 ``out``."""
    # A bfloat16 is the upper 16 bits of a float32. Adding uniform noise to the lower 16 bits carries into the upper ones with
    # a probability equal to the remainder; then the lower bits are cleared.
    noise = torch.randint(0, 2**16, value.shape, generator=generator, dtype=torch.int32, device=value.device)
    out.copy_(noise.add_(value.view(torch.int32)).bitwise_and_(-(2**16)).view(torch.float32))
