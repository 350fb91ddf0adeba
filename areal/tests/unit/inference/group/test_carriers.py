"""Carriers over gloo: what members of a group see when the trainer leaves it."""

from __future__ import annotations

import importlib.util
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from areal.inference.http.group.carrier import GlooCarrier, in_thread

TIMEOUT = timedelta(seconds=60)
ROOT = dist.BroadcastOptions()
ROOT.rootRank = ROOT.rootTensor = 0


def join(port: int, rank: int) -> Any:
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
    return dist.ProcessGroupGloo(store, rank, 3, TIMEOUT)


def test_members_that_wait_are_released_when_another_has_failed_and_the_trainer_leaves() -> None:
    """The error of the broadcast is kept, and must not keep the connections."""
    carrier = GlooCarrier()
    port = int(carrier.open(3)["master_port"])
    with ThreadPoolExecutor(2) as pool:
        members = [pool.submit(join, port, rank) for rank in (1, 2)]
        carrier.join(60)
        failing, waiting = (member.result() for member in members)
    members.clear()
    del failing  # its process ended
    sent = in_thread(lambda: carrier.broadcast([torch.zeros(10)], 60), "broadcast")
    with pytest.raises(RuntimeError, match="closed"):
        sent.result(30)
    # One broadcast may have reached it before the error, the second one has not.
    received = in_thread(
        lambda: [waiting.broadcast([torch.zeros(10)], ROOT).wait() for _ in range(2)] and None, "receive"
    )
    wait([received], 0.2)
    carrier.abort()
    with pytest.raises(RuntimeError, match="closed"):
        received.result(30)


class Recorded(GlooCarrier):
    """Is aborted by another thread at some moment of a join, and keeps what it would give to gloo."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[Any] = []

    def _make(self, store: dist.TCPStore, timeout: timedelta) -> Any:
        self.given.append(store)
        self.abort()
        return "group"


class AbortsFirst:
    """A store whose first use finds the carrier aborted."""

    def __init__(self, carrier: GlooCarrier) -> None:
        self._carrier = carrier

    def set_timeout(self, timeout: timedelta) -> None:
        self._carrier.abort()


def test_join_that_was_aborted_never_gives_gloo_an_absent_store() -> None:
    """gloo would end the process by a segmentation fault."""
    carrier = Recorded()
    carrier.open(2)
    store: Any = AbortsFirst(carrier)
    carrier._store = store
    with pytest.raises(RuntimeError, match="aborted"):
        carrier.join(1)
    assert carrier.given == [store]
    with pytest.raises(RuntimeError, match="no group was opened, or it was aborted"):
        carrier.join(1)


def test_group_that_was_aborted_while_its_members_joined_is_not_used() -> None:
    carrier = Recorded()
    carrier.open(2)
    with pytest.raises(RuntimeError, match="aborted while its members joined"):
        carrier.join(1)
    with pytest.raises(RuntimeError, match="the group was aborted"):
        carrier.broadcast([torch.zeros(1)], 1)


def test_no_group_has_the_name_of_one_of_another_process() -> None:
    """A server may keep the group of a trainer that was killed, and torch refuses a second one of that name."""
    names = []
    for _ in range(2):
        # The module as another process has it.
        spec = importlib.util.find_spec(GlooCarrier.__module__)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        carrier = module.TorchCarrier(backend="gloo", device="cpu")
        names += [carrier.open(2)["group_name"] for _ in range(2)]
        carrier.abort()
    assert len(set(names)) == 4
    assert all(name.startswith("areal-weights-") for name in names)
