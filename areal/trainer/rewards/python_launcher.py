"""Script that limits its own process and then runs a program in it. Needs Linux and the standard library only.

``python -I python_launcher.py JOB``: ``JOB`` is a JSON file with the fields of :class:`Job`, which the script removes. It makes the file
``ready`` before the program begins. With a test, it makes the file ``passed`` after the test, which a program that exits early never reaches.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import resource
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TypedDict


class Job(TypedDict):
    """A program with its limits: seconds of CPU time, bytes of memory, and bytes of each file."""

    program: str
    test: str
    ready: str
    passed: str
    cpu_seconds: int
    memory: int
    file_size: int


_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Values of ``AUDIT_ARCH`` in ``linux/audit.h``."""
_FORBIDDEN = {
    "x86_64": {
        "fork": 57,
        "vfork": 58,
        "setsid": 112,
        "setpgid": 109,
        "socket": 41,
        "kill": 62,
        "tkill": 200,
        "rt_sigqueueinfo": 129,
        "rt_tgsigqueueinfo": 297,
        "ptrace": 101,
        "process_vm_writev": 311,
        "pidfd_send_signal": 424,
    },
    "aarch64": {
        "setsid": 157,
        "setpgid": 154,
        "socket": 198,
        "kill": 129,
        "tkill": 130,
        "rt_sigqueueinfo": 138,
        "rt_tgsigqueueinfo": 240,
        "ptrace": 117,
        "process_vm_writev": 271,
        "pidfd_send_signal": 424,
    },
}
"""Numbers of system calls that fail with ``EPERM``."""
_CLONE = {"x86_64": 56, "aarch64": 220}
"""System call that starts a thread or a process."""
_SIGNAL = {"x86_64": 234, "aarch64": 131}
"""``tgkill``, by which a process also signals itself, as in ``abort``."""
_UNKNOWN = (425, 435)
"""``io_uring_setup``, which could make sockets, and ``clone3``, whose flags a filter cannot read, fail with ``ENOSYS``: libc uses others."""
_CLONE_THREAD = 0x10000
_FIRST_X32 = 0x40000000
"""On x86_64, further numbers of the same system calls begin here."""

# Instructions of a filter, from linux/bpf_common.h, and its results, from linux/seccomp.h.
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _FAIL, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
"""Offsets in ``struct seccomp_data``."""
_SET_NO_NEW_PRIVILEGES, _SET_SECCOMP, _MODE_FILTER = 38, 22, 2


class _Filter(ctypes.Structure):
    """``struct sock_fprog``."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def _instructions(machine: str) -> Iterator[bytes]:
    """Yield the filter of system calls, each instruction as ``struct sock_filter``: code, jumps if true and if false, value."""

    def instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("HBBI", code, if_true, if_false, value)

    yield instruction(_LOAD, _ARCHITECTURE)
    yield instruction(_EQUAL, _ARCHITECTURES[machine], if_true=1)
    yield instruction(_RETURN, _KILL)
    yield instruction(_LOAD, _NUMBER)
    yield instruction(_AT_LEAST, _FIRST_X32, if_false=1)
    yield instruction(_RETURN, _FAIL | errno.ENOSYS)
    fails = dict.fromkeys(_FORBIDDEN[machine].values(), errno.EPERM) | dict.fromkeys(_UNKNOWN, errno.ENOSYS)
    for number, error in fails.items():
        yield instruction(_EQUAL, number, if_false=1)
        yield instruction(_RETURN, _FAIL | error)
    # A signal to this process is allowed.
    yield instruction(_EQUAL, _SIGNAL[machine], if_false=4)
    yield instruction(_LOAD, _FIRST_ARGUMENT)
    yield instruction(_EQUAL, os.getpid(), if_true=1)
    yield instruction(_RETURN, _FAIL | errno.EPERM)
    yield instruction(_RETURN, _ALLOW)
    # A thread is allowed, a process is not.
    yield instruction(_EQUAL, _CLONE[machine], if_false=3)
    yield instruction(_LOAD, _FIRST_ARGUMENT)
    yield instruction(_ANY_BIT, _CLONE_THREAD, if_true=1)
    yield instruction(_RETURN, _FAIL | errno.EPERM)
    yield instruction(_RETURN, _ALLOW)


def _forbid_processes() -> None:
    """Forbid new processes and sessions, sockets, and signals to other processes, for the rest of this process."""
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        raise OSError(f"the processor {machine!r} is not one of {', '.join(_ARCHITECTURES)}")
    instructions = b"".join(_instructions(machine))
    program = _Filter(len(instructions) // 8, instructions)
    libc = ctypes.CDLL(None, use_errno=True)
    zero = ctypes.c_ulong(0)
    for arguments in (
        (_SET_NO_NEW_PRIVILEGES, ctypes.c_ulong(1), zero, zero, zero),
        (_SET_SECCOMP, ctypes.c_ulong(_MODE_FILTER), ctypes.byref(program), zero, zero),
    ):
        if libc.prctl(*arguments):
            code = ctypes.get_errno()
            raise OSError(code, f"the kernel refuses a filter of system calls (seccomp): {os.strerror(code)}")


def _limit(job: Job) -> None:
    """Set the limits of this process. The soft limit of CPU time ends a program by ``SIGXCPU``, the hard one if it ignores that."""
    resource.setrlimit(resource.RLIMIT_CPU, (job["cpu_seconds"], job["cpu_seconds"] + 1))
    resource.setrlimit(resource.RLIMIT_AS, (job["memory"], job["memory"]))
    resource.setrlimit(resource.RLIMIT_FSIZE, (job["file_size"], job["file_size"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _main() -> None:
    path = Path(sys.argv[1])
    job: Job = json.loads(path.read_text())
    path.unlink()
    _limit(job)
    _forbid_processes()
    Path(job["ready"]).touch()
    # The program is the main module.
    module = ModuleType("__main__")
    sys.modules["__main__"], sys.argv = module, ["program.py"]
    # Without the future statements of this file.
    exec(compile(job["program"], "program.py", "exec", dont_inherit=True), vars(module))
    if job["test"]:
        exec(compile(job["test"], "test.py", "exec", dont_inherit=True), vars(module))
        Path(job["passed"]).touch()


if __name__ == "__main__":
    _main()
