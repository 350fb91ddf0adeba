"""Idle time of the GPU benchmark, from fabricated events of a profiler."""

from __future__ import annotations

import pytest
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

from benchmarks.gpu.device import idle, kernel_spans


def event(start: float, end: float, device: DeviceType = DeviceType.CUDA, *, annotation: bool = False) -> FunctionEvent:
    return FunctionEvent(
        id=0, name="", thread=0, start_us=start, end_us=end, device_type=device, is_user_annotation=annotation
    )


def test_annotations_are_not_kernels() -> None:
    """FSDP and optimizers mark their phases on the device: a mark covers the gaps between the kernels of the phase."""
    events = [
        event(0, 10, annotation=True),
        event(0, 4),
        event(3, 6),
        event(8, 10),
        event(0, 10, DeviceType.CPU),
    ]
    assert kernel_spans(events) == [(0, 4), (3, 6), (8, 10)]
    assert idle(kernel_spans(events)) == pytest.approx(0.2)
