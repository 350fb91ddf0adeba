"""Devices: the only module that distinguishes GPUs from CPUs."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity

from areal.utils.profiling import host_memory

GLOO = "gloo"
"""Backend of process groups on CPUs, and of ranks that share a GPU."""

NCCL = "cuda:nccl"
"""Backend of the groups of an engine whose ranks have separate GPUs: a gloo backend would connect every rank to every other one."""

WORLD = "cpu:gloo,cuda:nccl"
"""Backend of the default process group whose ranks have separate GPUs: other programs may use it for tensors of the host."""

PLANNED = "planned"
"""Backend of process groups without other processes (:mod:`areal.plan`). Tensors are on the meta device, without values."""


def is_planned() -> bool:
    """Return whether the default process group has no other processes: collectives return at once, and values do not exist."""
    return dist.is_initialized() and dist.get_backend() == PLANNED


def accelerator() -> str:
    """Return ``"cuda"`` if there is a GPU, else ``"cpu"``."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def gpu_uuids() -> tuple[str, ...]:
    """Return the UUIDs of the GPUs that this process sees, by index."""
    if accelerator() == "cpu":
        return ()
    return tuple(str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count()))


def gpu_uuid(device: torch.device) -> str | None:
    """Return the UUID of a GPU, which other processes may number otherwise; ``None`` for another device."""
    if device.type != "cuda":
        return None
    return gpu_uuids()[torch.cuda.current_device() if device.index is None else device.index]


def local_rank() -> int | None:
    """Return the index of this process on its host, or ``None`` if the launcher does not set it."""
    value = os.environ.get("LOCAL_RANK")
    return None if value is None else int(value)


def local_gpu(device: torch.device) -> int | None:
    """Return the index of this process's GPU among those that it sees, also where torch is a build for CPUs.

    ``None`` if the process sees one GPU only, or the launcher does not set ``LOCAL_RANK``.
    """
    if device.type == "cuda":
        return torch.cuda.current_device() if device.index is None else device.index
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if visible is not None and "," not in visible else local_rank()


def current_device() -> torch.device:
    """Return the device of this process: the GPU of its local rank, else the current GPU, or the CPU.

    Without ``LOCAL_RANK`` the GPU is chosen when the default process group starts (:mod:`areal.utils.rank_gpus`).
    """
    if is_planned():
        return torch.device("meta")
    if accelerator() == "cpu":
        return torch.device("cpu")
    rank = local_rank()
    if rank is not None:
        return torch.device("cuda", rank % torch.cuda.device_count())
    # Before the choice, asking for the current GPU would allocate a context on the first one.
    return torch.device("cuda", torch.cuda.current_device() if dist.is_initialized() else 0)


def collective_backend() -> str:
    """Return the backend of the process groups that carry an engine's tensors: NCCL if the default group has it, else gloo."""
    if is_planned():
        return PLANNED
    return NCCL if "cuda:nccl" in dist.get_backend_config() else GLOO


def fast_dtype() -> Literal["bfloat16", "float32"]:
    """Return the dtype with the fastest matrix products: bfloat16 on GPUs and CPUs with bfloat16 instructions, else float32."""
    if accelerator() != "cpu":
        return "bfloat16"
    # Without such instructions, bfloat16 is several times slower than float32.
    capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return "bfloat16" if any(capabilities.get(name) for name in ("amx_bf16", "avx512_bf16", "bf16")) else "float32"


def set_device(device: torch.device) -> None:
    """Make ``device`` the current GPU. Does nothing for a CPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def empty_cache(device: torch.device) -> None:
    """Release the allocator's unused memory to the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def empty_host_cache(device: torch.device) -> None:
    """Release the unused part of the pinned host memory that torch keeps for copies from and to a GPU."""
    if device.type == "cuda" and hasattr(torch.accelerator, "empty_host_cache"):
        torch.accelerator.empty_host_cache()


def total_memory(device: torch.device) -> int:
    """Return the bytes of memory of a device: of the GPU, or of the host for each of its ranks."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return host_memory.total_bytes() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def free_memory(device: torch.device) -> int:
    """Return the bytes of a device that this process can still allocate: of the GPU, or of the host for each of its ranks."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    host_memory.trim()  # what this process has freed counts
    return host_memory.available_bytes() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def forget_peak(device: torch.device) -> None:
    """Let the peak of :func:`used_bytes` begin anew. On a CPU that needs Linux: elsewhere there is no peak."""
    if device.type == "cpu":
        host_memory.reset_peak()
    else:
        torch.cuda.reset_peak_memory_stats(device)


def used_bytes(device: torch.device, *, peak: bool = False) -> int:
    """Return the bytes that this process uses of a device: of a GPU its tensors, of a CPU what is resident; 0 if unknown."""
    if device.type == "cpu":
        return host_memory.resident_bytes(peak=peak) or 0
    return torch.cuda.max_memory_allocated(device) if peak else torch.cuda.memory_allocated(device)


def keep_freed(device: torch.device) -> None:
    """Let this process keep the host memory that it frees, from now on, as torch's allocator of a GPU keeps a GPU's.

    The C library would return large blocks to the system, and the next step pay for new pages. :func:`give_back` returns what is free at
    that time. Does nothing if the environment has settings for it: ``MALLOC_...`` or ``GLIBC_TUNABLES``.
    """
    if device.type == "cpu" and not any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        host_memory.hold()


def give_back(device: torch.device) -> None:
    """Return unused host memory to the system. On a GPU, the unused memory of the allocator counts as free."""
    if device.type == "cpu":
        host_memory.trim()


def reserved_bytes(device: torch.device) -> int:
    """Return the bytes of a device that the allocator of this process has, used and unused; 0 for a CPU."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def release_unused(device: torch.device) -> None:
    """Return unused memory of a device, and of the host for a CPU, to the system: torch's allocator would keep it for this process."""
    empty_cache(device)
    give_back(device)


def openblas_threads() -> int | None:
    """Return the number of threads that OpenBLAS, which numpy contains, was started with; ``None`` for one per core."""
    names = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")  # in the order of OpenBLAS
    numbers = (os.environ.get(name, "") for name in names)
    return next((int(number) for number in numbers if number.isdecimal() and int(number) > 0), None)


def synchronize(device: torch.device) -> None:
    """Wait for all work on a device. Does nothing for a CPU, whose execution is synchronous."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def host_buffer(nbytes: int, device: torch.device) -> Tensor:
    """Return host memory for copies from or to ``device``, uint8 ``[nbytes]``: pinned for a GPU, whose copies are then asynchronous."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that the device or the host ran out of memory."""
    texts = ("DefaultCPUAllocator: can't allocate memory", "RESOURCE_EXHAUSTED")  # of torch on a CPU, and of XLA
    return isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in texts)


def is_device_lost(error: BaseException | None) -> bool:
    """Return whether an error leaves the device unusable for this process: an illegal access, a failed assertion in a kernel, broken memory.

    Every later call to the device raises the same error, until the process is restarted.
    """
    while error is not None:
        if isinstance(error, torch.AcceleratorError) and not is_out_of_memory(error):
            return True
        error = error.__cause__
    return False


# ---- copies beside the computation


class SideCopies(Protocol):
    """Copies between a device and the host that run beside the computation, one after the other.

    The host waits for none of them.
    """

    def run(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Any:
        """Enqueue copies, which begin when the work that the caller has enqueued so far is complete.

        Args:
            pairs: target and source of each copy, of the same shape and dtype. The caller keeps them until it has waited.

        Returns:
            A mark behind the copies, for :meth:`wait`.
        """

    def wait(self, mark: Any) -> None:
        """Let the work that the caller enqueues from now on begin when the copies before a mark are complete."""


def side_copies(device: torch.device) -> SideCopies:
    """Return copies from and to ``device``: in a stream of a GPU; at once on a CPU; none of the meta device."""
    if device.type == "cuda":
        return _StreamCopies(device)
    return _NoCopies() if device.type == "meta" else _HostCopies()


class _StreamCopies:
    """Copies in a stream of a GPU. Both directions share it, so that a buffer is written only after it was read."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def run(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> torch.cuda.Event:
        # The sources are written, and the memory of the targets is read, by earlier work of the caller.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            return self._stream.record_event()

    def wait(self, mark: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(mark)


class _HostCopies:
    """Copies of a CPU, whose execution is synchronous."""

    def run(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        for target, source in pairs:
            target.copy_(source)

    def wait(self, mark: None) -> None:
        pass


class _NoCopies:
    """Copies of tensors without values."""

    def run(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        pass

    def wait(self, mark: None) -> None:
        pass


# ---- time and memory of a device


class Stopwatch(Protocol):
    """Measures the time between marks in the execution of a device."""

    def mark(self) -> Any:
        """Set a mark at this point of the execution."""

    def laps(self, marks: Sequence[Any]) -> list[float]:
        """Return the seconds between each mark and the next."""


def stopwatch(device: torch.device) -> Stopwatch:
    """Return a stopwatch for work on ``device``, in its current stream."""
    return _StreamStopwatch(device) if device.type == "cuda" else _HostStopwatch()


class _HostStopwatch:
    """Stopwatch of a CPU: execution is synchronous, so that the host's clock is exact."""

    def mark(self) -> float:
        return time.perf_counter()

    def laps(self, marks: Sequence[float]) -> list[float]:
        return [after - before for before, after in pairwise(marks)]


class _StreamStopwatch:
    """Stopwatch of a GPU: marks are events in a stream. The host waits only in :meth:`laps`.

    All marks are in the stream that is current when the stopwatch is created. Work in other streams counts while this stream
    waits for it.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def laps(self, marks: Sequence[torch.cuda.Event]) -> list[float]:
        marks[-1].synchronize()  # elapsed_time() needs completed events, and returns milliseconds
        return [before.elapsed_time(after) / 1000 for before, after in pairwise(marks)]


def profiler_activities(device: torch.device) -> list[ProfilerActivity]:
    """Return the activities to record in a profile of work on ``device``."""
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]


def profiled_memory(device: torch.device) -> tuple[int, int]:
    """Return the number of the device type in a profiler's memory events, and the bytes allocated now (0 on a CPU: unknown)."""
    return (1, torch.cuda.memory_allocated(device)) if device.type == "cuda" else (0, 0)


def start_memory_history(device: torch.device) -> None:
    """Start to record each allocation with its stack. Does nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.memory._record_memory_history(device=device)


def save_memory_history(device: torch.device, path: Path) -> None:
    """Write the recorded allocations for https://pytorch.org/memory_viz, and stop recording."""
    if device.type == "cuda":
        torch.cuda.memory._dump_snapshot(str(path))
        torch.cuda.memory._record_memory_history(enabled=None, device=device)


def leave_tpu_alone() -> None:
    """Set what the compiler of TPUs would otherwise ask the metadata server of a cloud machine for. Before the import of JAX."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")


_CUBLAS = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
"""Variables of the environment with which cuBLAS does not split sums over blocks."""


def switch_gpu_to_fixed_sums() -> None:
    """Set torch's and cuBLAS's switches that keep a product's order of summation, for this process.

    torch has no mode of its own in which the bits of a row do not depend on the batch: this was not run on a GPU.
    """
    # Read when a process calls cuBLAS first. Values of the user stay.
    for name, value in _CUBLAS.items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True)
    matmul: Any = torch.backends.cuda.matmul
    matmul.allow_tf32 = False
    matmul.allow_bf16_reduced_precision_reduction = False
    matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.preferred_blas_library("cublaslt")
