"""Linear layers and experts that multiply float8 numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from areal.api.sections.float8 import Float8Config
from areal.engine.model.stacked_experts import WEIGHTS, check_convertible, has_stacked_experts, is_grouped_product
from areal.engine.torch.float8.products import Products


def convert_layers(layers: Sequence[nn.Module], config: Float8Config, products: Products) -> list[str]:
    """Let linear layers, and experts if the configuration says so, multiply float8 numbers, in place.

    Args:
        layers: decoder layers. They may be on the meta device.
        config: the layers that are left out.
        products: from :func:`~areal.engine.torch.float8.products.float8_products`.

    Returns:
        Names of the converted modules, relative to their decoder layer, each once.

    Raises:
        ValueError: the sizes of a layer do not fit the products, or no layer is left.
    """
    found: dict[str, None] = {}
    for layer in layers:
        for name, module in layer.named_modules():
            if name.rpartition(".")[2] in config.exclude:
                continue
            if products.grouped is not None:
                check_convertible(name, module, "float8.exclude")
            if isinstance(module, nn.Linear):
                _check(f"{name}.weight", module.weight, config, products)
                forward: Any = _Float8Linear(module, products.linear)
            elif products.grouped is not None and has_stacked_experts(module):
                for weight in WEIGHTS:
                    _check(f"{name}.{weight}", module.get_parameter(weight), config, products)
                forward = _Float8Experts(module, products.grouped)
            else:
                continue
            layer.get_submodule(name).forward = forward
            found[name] = None
    if not found:
        raise ValueError(f"float8.exclude = {config.exclude}: no layer is left to convert; leave names out of it")
    return list(found)


def _check(name: str, weight: Tensor, config: Float8Config, products: Products) -> None:
    out, inputs = weight.shape[-2:]
    if out % products.multiple or inputs % products.multiple:
        module = name.removesuffix(".weight")
        raise ValueError(
            f"float8.recipe = {config.recipe!r}: {module} has {inputs} inputs and {out} outputs, and both must be multiples of "
            f"{products.multiple}; add {name.split('.')[-2]!r} to float8.exclude, or leave experts out"
        )


class _Float8Linear:
    """Forward of a linear layer."""

    def __init__(self, module: nn.Linear, product: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._module, self._product = module, product

    def __call__(self, x: Tensor) -> Tensor:
        out = self._product(x, self._module.weight)
        return out if self._module.bias is None else out + self._module.bias


class _Float8Experts:
    """Forward of the experts of a layer, whose own forward calls torch's grouped product."""

    def __init__(self, module: nn.Module, product: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        self._kind, self._product = type(module).__name__, product
        self._inner = module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _GroupedProducts(self._product) as products:
            out = self._inner(*args, **kwargs)
        if not products.called:
            raise ValueError(
                f"float8.experts = True: {self._kind} multiplies by no grouped product of torch; leave experts out"
            )
        return out


class _GroupedProducts(TorchFunctionMode):
    """Replaces the grouped products inside."""

    def __init__(self, product: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self._product, self.called = product, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_grouped_product(func):
            self.called = True
            return self._product(args[0], args[1], kwargs["offs"])
        return func(*args, **kwargs)
