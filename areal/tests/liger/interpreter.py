"""Let Triton's interpreter run Liger's kernels: it lacks two things that the compiler has."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def complete_interpreter() -> None:
    """Give numbers the type float32, as the compiler does, and let the norm call an ``rsqrt`` that the interpreter has."""
    convert = interpreter._implicit_cvt

    def typed(argument: Any) -> Any:
        if not isinstance(argument, float):
            return convert(argument)
        return tl.tensor(interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32), tl.float32)

    interpreter._implicit_cvt = typed
    # The name `rms_norm` of the package may be a function.
    norm = importlib.import_module("liger_kernel.ops.rms_norm")
    norm.rsqrt = lambda x: tl.rsqrt(x)  # type: ignore[attr-defined]  # looked up while the interpreter runs
