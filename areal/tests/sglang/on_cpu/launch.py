"""Start SGLang's server on a CPU. Its processes import this file again, and with it the changes that a machine without CUDA needs.

The folder of this file is first on the path: ``sgl_kernel`` is the stub next to it.
"""

from __future__ import annotations

import functools
import importlib.util
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

# torchvision of the package index is built for CUDA, and its import fails at two operators with torch for CPUs. Only their names are needed.
_torchvision = importlib.util.find_spec("torchvision")
try:
    torch.ops.load_library(Path(_torchvision.origin).with_name("_C.so"))
except OSError:
    _library = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _library.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def _without_pinned_memory(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a constructor of tensors that ignores ``pin_memory``, which needs an accelerator. Adapters ask for it."""

    @functools.wraps(make)
    def made(*values: Any, **options: Any) -> torch.Tensor:
        options.pop("pin_memory", None)
        return make(*values, **options)

    return made


for _name in ("tensor", "empty", "zeros", "arange"):
    setattr(torch, _name, _without_pinned_memory(getattr(torch, _name)))
torch.Tensor.pin_memory = lambda self, *_: self

from sglang.srt import batch_invariant_ops  # noqa: E402 - after the operators above
from sglang.srt.arg_groups import choices  # noqa: E402

# Seeds are respected with an attention backend of this list only, and with kernels of Triton. Without the latter, a log-prob depends on the
# other requests of the batch in its last bits.
choices.add_deterministic_attention_backend_choices(["torch_native"])
batch_invariant_ops.enable_batch_invariant_mode = lambda *_, **__: None

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
