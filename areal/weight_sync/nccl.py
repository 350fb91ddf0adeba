"""A raw NCCL communicator, for groups with processes that do not use ``torch.distributed``. Calls libnccl by ctypes.

The library is loaded when the first communicator or :class:`NCCLLibrary` is constructed, not at import. Not run on GPUs yet.
"""

from __future__ import annotations

import ctypes
import importlib.util
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

UNIQUE_ID_BYTES = 128
"""Size of the id that all members of a communicator must have."""

_LIBRARY = "libnccl.so.2"
_PACKAGE = "nvidia.nccl"
"""Package of the wheels ``nvidia-nccl-cu*``, which PyTorch for CUDA depends on."""

_SUCCESS, _IN_PROGRESS = 0, 7
_SUM = 0
_REVOKE_DEFAULT = 0
_UNDEFINED = -(2**31)
"""``NCCL_CONFIG_UNDEF_INT``: the default of an option."""
_POLL_SECONDS = 0.0005

_DTYPES = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
    torch.float8_e4m3fn: 10,
}
"""Values of ``ncclDataType_t``."""


class _UniqueId(ctypes.Structure):
    """``ncclUniqueId``."""

    _fields_ = [("internal", ctypes.c_byte * UNIQUE_ID_BYTES)]


class _Config(ctypes.Structure):
    """``ncclConfig_t`` of NCCL 2.14, which all later releases accept. The last field fills the structure's padding."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("padding", ctypes.c_int),
    ]


_COMM = ctypes.c_void_p
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "ncclGetUniqueId": (ctypes.POINTER(_UniqueId),),
    "ncclCommInitRankConfig": (
        ctypes.POINTER(_COMM),
        ctypes.c_int,
        _UniqueId,
        ctypes.c_int,
        ctypes.POINTER(_Config),
    ),
    "ncclCommGetAsyncError": (_COMM, ctypes.POINTER(ctypes.c_int)),
    "ncclCommAbort": (_COMM,),
    "ncclAllReduce": (
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        _COMM,
        ctypes.c_void_p,
    ),
    "ncclBroadcast": (
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        _COMM,
        ctypes.c_void_p,
    ),
}
"""Types of the arguments of each function that returns ``ncclResult_t``."""
_LATER_FUNCTIONS: dict[str, tuple[Any, ...]] = {"ncclCommRevoke": (_COMM, ctypes.c_int)}
"""The same of functions that older releases lack, which are needed for resharding only."""


class NCCLError(RuntimeError):
    """A function of NCCL failed. The text has the function's name and NCCL's description."""


class NCCLLibrary:
    """The functions of libnccl.

    Args:
        path: file of the library. By default the one that PyTorch has loaded, or the one in the package ``nvidia-nccl``.
        loaded: library object to use in place of a file.

    Raises:
        RuntimeError: the library was not found, or lacks a function.
    """

    def __init__(self, path: str | Path | None = None, *, loaded: Any = None) -> None:
        self._lib = _load(path) if loaded is None else loaded
        try:
            for name, arguments in _FUNCTIONS.items():
                function = getattr(self._lib, name)
                function.argtypes, function.restype = list(arguments), ctypes.c_int
            for name, arguments in _LATER_FUNCTIONS.items():
                if hasattr(self._lib, name):
                    getattr(self._lib, name).argtypes = list(arguments)
            self._lib.ncclGetErrorString.argtypes = [ctypes.c_int]
            self._lib.ncclGetErrorString.restype = ctypes.c_char_p
        except AttributeError as error:
            raise RuntimeError(f"NCCL 2.14 or newer is needed: {error}") from error

    def call(self, name: str, *arguments: Any) -> bool:
        """Call a function. Returns False if it continues in the background.

        Raises:
            NCCLError: it failed.
        """
        try:
            function = getattr(self._lib, name)
        except AttributeError as error:
            raise NCCLError(f"{name}: a newer NCCL is needed: {error}") from error
        result = function(*arguments)
        if result not in (_SUCCESS, _IN_PROGRESS):
            raise NCCLError(f"{name}: {self.describe(result)}")
        return bool(result == _SUCCESS)

    def describe(self, result: int) -> str:
        """Return NCCL's description of a result."""
        text = self._lib.ncclGetErrorString(result)
        return f"{text.decode() if text else 'unknown error'} (ncclResult_t {result})"

    def unique_id(self) -> bytes:
        """Return a new id, ``[128]`` bytes. It must reach all members of the communicator."""
        made = _UniqueId()
        self.call("ncclGetUniqueId", ctypes.byref(made))
        return bytes(made)


class NCCLCommunicator:
    """One rank of a communicator. Every call returns within its time limit: afterwards the communicator is aborted.

    Only :meth:`abort` may be called from another thread. The current CUDA device must be that of the tensors.

    Args:
        library: functions of NCCL.
        unique_id: ``[128]`` bytes, the same on all ranks.
        rank, size: rank of this process, and number of ranks.
        stream: stream of the collectives.
        seconds: time limit for all ranks to join.

    Raises:
        NCCLError: NCCL reports an error.
        TimeoutError: a rank did not join in time.
        ValueError: the id has another length, or the rank is out of range.
    """

    def __init__(
        self, library: NCCLLibrary, unique_id: bytes, rank: int, size: int, stream: torch.cuda.Stream, seconds: float
    ) -> None:
        if len(unique_id) != UNIQUE_ID_BYTES:
            raise ValueError(f"unique_id has {len(unique_id)} bytes: it must have {UNIQUE_ID_BYTES}")
        if not 0 <= rank < size:
            raise ValueError(f"rank = {rank}: it must be in [0, {size})")
        self._library, self._stream = library, stream
        self._comm: ctypes.c_void_p | None = _COMM()
        self._revoked = False
        self._lock = threading.Lock()
        # Not blocking: NCCL would otherwise wait for missing ranks without a time limit.
        config = _Config(ctypes.sizeof(_Config), 0xCAFEBEEF, 21400, 0, _UNDEFINED)
        deadline = time.monotonic() + seconds
        made = _UniqueId.from_buffer_copy(unique_id)
        self._start("ncclCommInitRankConfig", lambda comm: (ctypes.byref(comm), size, made, rank, ctypes.byref(config)))
        self._settle(deadline, f"not all of {size} ranks joined within {seconds:g} s")

    def all_reduce(self, tensor: Tensor, seconds: float) -> None:
        """Replace a tensor by its sum over all ranks. Blocks the host until the end."""
        data = tensor.data_ptr()
        self._run("ncclAllReduce", (data, data, tensor.numel(), _dtype(tensor), _SUM), seconds)

    def broadcast(self, tensor: Tensor, root: int, seconds: float) -> None:
        """Send a contiguous tensor from rank ``root`` to all others. Blocks the host until the end."""
        if not tensor.is_contiguous():
            raise ValueError(f"a tensor of strides {tensor.stride()} cannot be sent: call contiguous() first")
        data = tensor.data_ptr()
        self._run("ncclBroadcast", (data, data, tensor.numel(), _dtype(tensor), root), seconds)

    @property
    def pointer(self) -> int:
        """The ``ncclComm_t``, for libraries that run collectives on it."""
        return int(self._require().value or 0)

    def revoke(self) -> None:
        """Stop running collectives, also of other libraries, which may go on to use the communicator. From any thread, also twice."""
        with self._lock:
            if self._comm is not None and not self._revoked:
                self._revoked = True
                self._library.call("ncclCommRevoke", self._comm, _REVOKE_DEFAULT)

    def wait(self, seconds: float) -> None:
        """Wait until the stream is idle. After an error the communicator is revoked, and not aborted.

        Raises:
            NCCLError: NCCL reports an error, or the communicator was revoked.
            TimeoutError: the time limit has passed.
        """
        late = f"the work on the stream did not end within {seconds:g} s"
        self._wait(time.monotonic() + seconds, late, self.revoke)

    def settle(self, seconds: float) -> None:
        """Wait until a revoked communicator has stopped its collectives, or until the time limit."""
        deadline = time.monotonic() + seconds
        while self._state() == _IN_PROGRESS and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def abort(self) -> None:
        """Stop running collectives and release the communicator. From any thread, also twice."""
        with self._lock:
            comm, self._comm = self._comm, None
            if comm is not None and comm.value:
                self._library.call("ncclCommAbort", comm)

    def _run(self, name: str, arguments: tuple[Any, ...], seconds: float) -> None:
        """Start a collective on the stream, and wait until the stream is idle."""
        deadline = time.monotonic() + seconds
        late = f"{name} did not end within {seconds:g} s"
        self._start(name, lambda comm: (*arguments, comm, self._stream.cuda_stream))
        self._settle(deadline, late)
        self._wait(deadline, late, self._give_up)

    def _wait(self, deadline: float, late: str, end: Callable[[], None]) -> None:
        """Wait until the stream is idle. ``end`` is called after an error."""
        while not self._stream.query():
            # A rank that is lost is reported by NCCL, or not at all: then the time limit ends the wait.
            self._check(deadline, late, end)
            if self._revoked:
                raise NCCLError("the communicator was revoked")
            time.sleep(_POLL_SECONDS)

    def _start(self, name: str, arguments: Callable[[ctypes.c_void_p], tuple[Any, ...]]) -> None:
        """Call a function that does not block. The lock keeps the communicator alive during the call."""
        try:
            with self._lock:
                self._library.call(name, *arguments(self._require()))
        except NCCLError:
            self._give_up()
            raise

    def _settle(self, deadline: float, late: str) -> None:
        """Wait until a call has ended that continues in the background."""
        while self._check(deadline, late, self._give_up) == _IN_PROGRESS:
            time.sleep(_POLL_SECONDS)

    def _check(self, deadline: float, late: str, end: Callable[[], None]) -> int:
        """Return the state of the communicator. ``end`` is called before an error is raised.

        Raises:
            NCCLError: it failed, or was aborted by another thread.
            TimeoutError: the time limit has passed.
        """
        state = self._state()
        if state not in (_SUCCESS, _IN_PROGRESS):
            end()
            raise NCCLError(self._library.describe(state))
        if time.monotonic() > deadline:
            end()
            raise TimeoutError(late)
        return state

    def _state(self) -> int:
        """Return the state of the communicator, as NCCL reports it."""
        state = ctypes.c_int()
        with self._lock:
            self._library.call("ncclCommGetAsyncError", self._require(), ctypes.byref(state))
        return state.value

    def _give_up(self) -> None:
        """Abort after an error, without another one."""
        try:
            self.abort()
        except NCCLError:
            return

    def _require(self) -> ctypes.c_void_p:
        if self._comm is None:
            raise NCCLError("the communicator was aborted")
        return self._comm


def _dtype(tensor: Tensor) -> int:
    if tensor.dtype not in _DTYPES:
        raise ValueError(
            f"dtype {tensor.dtype} is not supported by NCCL: cast to one of {', '.join(map(str, _DTYPES))}"
        )
    return _DTYPES[tensor.dtype]


def find_library() -> str:
    """Return the path or the name under which the dynamic linker finds NCCL: loaded, installed, or in PyTorch's package."""
    spec = None
    if importlib.util.find_spec(_PACKAGE.partition(".")[0]) is not None:
        spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        file = Path(folder) / "lib" / _LIBRARY
        if file.is_file():
            return str(file)
    return _LIBRARY


def _load(path: str | Path | None) -> ctypes.CDLL:
    # The name alone returns the library that PyTorch has loaded, if it has.
    tried = [str(path)] if path is not None else [_LIBRARY, find_library()]
    errors: list[str] = []
    for name in dict.fromkeys(tried):
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            errors.append(str(error))
    raise RuntimeError(
        f"NCCL was not found ({'; '.join(errors)}): install PyTorch for CUDA, or the package nvidia-nccl-cu12 (cu13), "
        "or name the file of the library"
    )
