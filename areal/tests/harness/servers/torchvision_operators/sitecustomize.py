"""Lets a process import torchvision whose compiled operators do not load beside this build of torch.

transformers' image processors need torchvision, and none of its operators. Python imports this module at its start, if its folder is in
``PYTHONPATH``. The operators are declared before torchvision describes them to torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_FORWARD = ("roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d")
_OPERATORS = ("nms", "qnms", "qroi_align", *_FORWARD, *(f"_{name}_backward" for name in _FORWARD))
_KEPT: list[object] = []


class _Declare(MetaPathFinder):
    """Declares the operators when torchvision is imported, and finds nothing."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torchvision":
            return None
        sys.meta_path.remove(self)
        import torch

        library = torch.library.Library("torchvision", "FRAGMENT")
        for operator in _OPERATORS:
            library.define(f"{operator}(Tensor x) -> Tensor")
        _KEPT.append(library)  # its end would remove them
        return None


sys.meta_path.insert(0, _Declare())
