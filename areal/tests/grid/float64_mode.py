"""Runs models entirely in float64.

Modeling code casts to float32 wherever bf16 would be too coarse: norms, softmax, rotary angles, routers. A float64 model is then
exact to 1e-7 only, which hides errors of an engine that a comparison to 1e-10 shows. Inside :func:`float64_everywhere` a
cast of a float64 (or integer) tensor to float32 gives float64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from areal.engine.model import fused_layers
from areal.engine.registry import engine_class, engine_names

for _name in engine_names():  # before the mode is entered: on the CPU Megatron-Core installs its own ``Tensor.type``
    with suppress(ValueError):  # its dependencies are not installed
        engine_class(_name)

_to = Tensor.to
_WIDE = (torch.float64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
"""Dtypes that a cast to float32 would narrow, and integers, which are exact in float64 too."""


@contextmanager
def float64_everywhere() -> Iterator[None]:
    """Lift casts to float32, in forward, backward and recomputation, for every thread of this process.

    Enter it before a model is built: rotary frequencies are computed at that time, and are float64 only inside. Float32 and
    narrower tensors are not changed. Compiled graphs contain their
    original casts, because dynamo recognizes torch's functions by identity.
    """
    with ExitStack() as stack:
        for name, lifted in (("float", _float), ("to", _lifted_to), ("type_as", _type_as)):
            stack.enter_context(mock.patch.object(Tensor, name, lifted))
        stack.enter_context(mock.patch.object(Tensor, "type", _lift_type(Tensor.type)))
        for owner in (Tensor, F, torch):
            for name in ("softmax", "log_softmax"):
                stack.enter_context(mock.patch.object(owner, name, _lift_dtype(getattr(owner, name))))
        stack.enter_context(mock.patch.object(torch, "arange", _lift_factory(torch.arange)))
        fused = fused_layers.FUSED_NORM_DTYPES | {torch.float64}
        stack.enter_context(mock.patch.object(fused_layers, "FUSED_NORM_DTYPES", fused))
        yield


def _float(self: Tensor, **options: Any) -> Tensor:
    return _lifted_to(self, torch.float32, **options)


def _type_as(self: Tensor, other: Tensor) -> Tensor:
    return _lifted_to(self, other)


@torch.compiler.allow_in_graph
def _lifted_to(self: Tensor, *args: Any, **options: Any) -> Tensor:
    if self.dtype not in _WIDE:
        return _to(self, *args, **options)
    other = next((arg for arg in (*args, options.get("other")) if isinstance(arg, Tensor)), None)
    if other is not None and other.dtype == torch.float32:
        args = tuple(arg for arg in args if not isinstance(arg, Tensor))
        options = {key: value for key, value in options.items() if key != "other"}
        return _to(self, other.device, torch.float64, *args, **options)
    args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
    if options.get("dtype") is torch.float32:
        options["dtype"] = torch.float64
    return _to(self, *args, **options)


def _lift_dtype(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap a function so that ``dtype=`` does not narrow a float64 input to float32."""

    @torch.compiler.allow_in_graph
    @functools.wraps(function)
    def lifted(x: Tensor, *args: Any, **options: Any) -> Tensor:
        if x.dtype == torch.float64 and options.get("dtype") is torch.float32:
            options["dtype"] = torch.float64
        return function(x, *args, **options)

    return lifted


def _lift_type(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def lifted(self: Tensor, *args: Any, **options: Any) -> Any:
        return _lifted_to(self, torch.float32) if args == (torch.float32,) else function(self, *args, **options)

    return lifted


def _lift_factory(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(function)
    def lifted(*args: Any, **options: Any) -> Tensor:
        if options.get("dtype") is torch.float32:
            options["dtype"] = torch.float64
        return function(*args, **options)

    return lifted
