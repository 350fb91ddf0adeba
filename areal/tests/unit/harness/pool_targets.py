"""Functions that tests of the worker pool run in its workers."""

import os
import sys
import time

import pytest
import torch
import torch.distributed as dist

VALUE = "right"


def add_up(offset: int) -> None:
    total = torch.tensor(dist.get_rank() + offset)
    dist.all_reduce(total)
    size = dist.get_world_size()
    assert total.item() == size * (size - 1) // 2 + size * offset


def fail_on(rank: int) -> None:
    print(f"about to fail on {rank}")
    if dist.get_rank() == rank:
        assert {"a": 1}["a"] + 1 == 3, "arithmetic"


def skip_all() -> None:
    pytest.skip("not today")


def hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(3600)


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        print("last words", file=sys.stderr, flush=True)
        os._exit(7)
    dist.barrier()


def fail_alone_before_barrier() -> None:
    if dist.get_rank() == 0:
        raise RuntimeError("rank 0 never arrives")
    dist.barrier()


_kept: list[bytearray] = []


def grow(megabytes: int) -> None:
    _kept.append(bytearray(b"x") * (megabytes << 20))


def patch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "VALUE", "patched")
    monkeypatch.setenv("AREAL_PATCHED", "1")
    assert VALUE == "patched"


def is_not_patched() -> None:
    assert VALUE == "right"
    assert "AREAL_PATCHED" not in os.environ
