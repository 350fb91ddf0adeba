"""Carriers over gloo: what members of a group see when the trainer leaves it."""

from __future__ import annotations

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
