"""AdamW that keeps its moments in bfloat16: half their memory, with rounding that loses nothing on average."""

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

    A moment moves by a small share of itself, less than half a unit of bfloat16's last place: rounded to nearest it would never move.
    Rounded up with the probability that its remainder is of that unit, it is right on average (Gupta et al., 2015). The noise comes from
    ``seed``, the step, the parameter's name and where a shard lies in it, so that ranks with the same shard round alike, and a run that goes
    on from a checkpoint goes on with the same noise.

    Args:
        parameters: plain or distributed tensors, of which each is stepped in its own dtype; arithmetic is in float32.
        seed: of the noise. names: of the parameters; their numbers where there are none.
        others: as of ``torch.optim.AdamW``.
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
        """As torch's, which makes the moments float32 on their way."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state |= {name: state[name].bfloat16() for name in _MOMENTS}

    def _update(self, parameter: nn.Parameter, group: dict[str, Any], number: int) -> None:
        state, name = self.state[parameter], self._names[number] if self._names else number
        if not state:
            state["step"] = torch.zeros(())
            for name in _MOMENTS:
                state[name] = empty_like(parameter, dtype=torch.bfloat16)
                local_part(state[name]).zero_()
        state["step"] += 1
        step, (beta1, beta2) = int(state["step"]), group["betas"]
        weight, box = local_shard(parameter)
        where = [(part.start, part.stop) for part in box]
        gradient = local_part(parameter.grad).float()  # type: ignore[arg-type]  # there is one
        first = local_part(state["exp_avg"]).float().lerp_(gradient, 1 - beta1)
        second = local_part(state["exp_avg_sq"]).float().mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        generator = torch.Generator(weight.device).manual_seed(mixed(self._seed, name, step, where))
        _round(local_part(state["exp_avg"]), first, generator)
        _round(local_part(state["exp_avg_sq"]), second, generator)
        second.div_(1 - beta2**step).sqrt_().add_(group["eps"])
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.sub_(first.div_(second).mul_(group["lr"] / (1 - beta1**step)))


def _round(out: Tensor, value: Tensor, generator: torch.Generator) -> None:
    """``value`` float32 into ``out`` bfloat16: the upper half of its bits, after noise was added to the lower half."""
    noise = torch.randint(0, 2**16, value.shape, generator=generator, dtype=torch.int32, device=value.device)
    out.copy_(noise.add_(value.view(torch.int32)).bitwise_and_(-(2**16)).view(torch.float32))
