"""Muon in float64, one matrix after another, in one process: what engines are compared with."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from areal.api import OptimizerConfig

_OTHERS = re.compile(r"embed|lm_head|norm|bias|conv|value_head|pos_|A_log|dt_bias")
"""Names of parameters that AdamW updates."""


def orthogonal(x: Tensor, steps: int) -> Tensor:
    """Return Newton-Schulz of one matrix, by the singular values: the iteration changes nothing else."""
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    s = s / s.norm()
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ s.diag() @ v


class ReferenceMuon:
    """Muon for matrices and torch's AdamW for the other weights.

    Args:
        named: names in transformers and weights.
        config: settings; the iteration is in float64 in any case.
        qkv: rows of queries, and of keys or values, of a layer that computes all three.
    """

    def __init__(self, named: Sequence[tuple[str, Tensor]], config: OptimizerConfig, qkv: tuple[int, int]) -> None:
        self._config, self._qkv = config, qkv
        self._matrices = [(name, x) for name, x in named if x.dim() > 1 and not _OTHERS.search(name)]
        mine = {id(x) for _, x in self._matrices}
        self._adamw = torch.optim.AdamW(
            [x for _, x in named if id(x) not in mine],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
            foreach=False,
        )
        self.param_groups = self._adamw.param_groups
        self.momenta = {name: torch.zeros_like(x) for name, x in self._matrices}

    @torch.no_grad()
    def step(self) -> None:
        self._adamw.step()
        group, muon = self.param_groups[0], self._config.muon
        for name, weight in self._matrices:
            gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
            momentum = self.momenta[name]
            momentum.copy_(muon.momentum * momentum + (1 - muon.momentum) * gradient)
            direction = (1 - muon.momentum) * gradient + muon.momentum * momentum if muon.nesterov else momentum
            weight *= 1 - group["lr"] * group["weight_decay"]
            for part, of in zip(self._parts(name, weight), self._parts(name, direction), strict=True):
                rows, columns = part.shape
                scale = math.sqrt(max(1, rows / columns))
                if muon.scale == "match_rms_adamw":
                    scale = 0.2 * math.sqrt(max(rows, columns))
                part -= group["lr"] * scale * orthogonal(of, muon.steps)

    def zero_grad(self) -> None:
        self._adamw.zero_grad()
        for _, weight in self._matrices:
            weight.grad = None

    def _parts(self, name: str, x: Tensor) -> Iterator[Tensor]:
        """Yield views of the matrices of a weight."""
        for one in x if x.dim() == 3 else [x]:
            if "gate_up_proj" in name:
                yield from one.chunk(2)
            elif "qkv_proj" in name:
                queries, keys = self._qkv
                yield from one.split([queries, keys, keys])
            else:
                yield one
