"""Weight transports between real processes: complete updates, killed trainers and receivers, and mismatched models."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from areal.api import NamedTensor, WeightReceiver
from areal.engine.checkpoint.async_save import ignore
from areal.tests.harness.limits import promptly
from areal.tests.harness.processes import needs_own_world
from areal.tests.harness.tiny import same_bits
from areal.tests.unit.weight_sync.transports import (
    BUCKET,
    dying,
    ended,
    filled,
    number,
    receiver_of,
    receiving,
    start,
    transport_to,
    wait_for,
)
from areal.utils.distributed import ControlPlane, init_default_group
from areal.weight_sync import (
    DirectTransport,
    DiskReceiver,
    DiskTransport,
    ModuleSource,
    PeerLostError,
    SharedMemoryTransport,
)
from areal.weight_sync.apply import Staging
from areal.weight_sync.bucket import BucketSlice
from areal.weight_sync.transport import Transport

pytestmark = needs_own_world

PUSHED = ("broadcast", "ipc")


# ---- push


def push_and_be_killed(way: str, socket_dir: Path, stage: str) -> None:
    torch.set_num_threads(1)
    init_default_group()
    armed: list[bool] = []
    transport = transport_to(way, socket_dir, ControlPlane(), observe=dying(stage, armed))
    transport.send(ModuleSource(filled(1)), 1)
    armed.append(True)
    transport.send(ModuleSource(filled(2)), 2)


@pytest.mark.parametrize("way", PUSHED)
@pytest.mark.parametrize("stage", ["ready", "open", "bucket 0", "bucket 3", "staged", "committed"])
def test_killed_trainer_leaves_old_version_serving(way: str, stage: str, socket_dir: Path) -> None:
    process = start(push_and_be_killed, way, socket_dir, stage)
    module = filled(0)
    receiver = receiver_of(way, socket_dir, module)
    assert receiver.version is None
    assert receiver.receive(60.0) == 1
    assert (number(module), receiver.version) == (1, 1)
    with promptly():
        if stage == "committed":  # the receiver was asked to stop, so it may end
            assert receiver.receive(60.0) == 2
        with pytest.raises(PeerLostError, match=r"the trainer.*; version [12] serves"):
            receiver.receive(60.0)
    expected = 2 if stage == "committed" else 1
    assert (number(module), receiver.version) == (expected, expected)
    receiver.close()
    assert ended(process) == -signal.SIGKILL


def receive_and_be_killed(way: str, socket_dir: Path, name: str, at_bucket: int) -> None:
    """Receive versions until the trainer ends and record the served weights, or exit at a bucket of the second version."""
    torch.set_num_threads(1)
    buckets: list[str] = []

    def die(reached: str) -> None:
        buckets.append(reached)
        if receiver.version == 1 and buckets.count("bucket") == at_bucket:
            os.kill(os.getpid(), signal.SIGKILL)
        if reached == "committed":
            buckets.clear()

    module = filled(0)
    receiver = receiver_of(way, socket_dir, module, observe=die)
    versions = []
    try:
        while True:
            versions.append(receiver.receive(60.0))
    except PeerLostError:
        (socket_dir / name).write_text(f"{versions} {number(module):g} {receiver.version}")


@pytest.mark.parametrize("way", PUSHED)
def test_killed_receiver_is_named_and_others_continue(way: str, socket_dir: Path, control: ControlPlane) -> None:
    processes = [start(receive_and_be_killed, way, socket_dir, f"r{i}", 4 if i else -1) for i in range(2)]
    transport = transport_to(way, socket_dir, control, receivers=2)
    transport.send(ModuleSource(filled(1)), 1)
    gone = rf"receiver \S+:{processes[1].pid} is gone.*version 2 was not sent; receivers keep what they have"
    with promptly(), pytest.raises(RuntimeError, match=gone):
        transport.send(ModuleSource(filled(2)), 2)
    transport._sender._receivers = 1  # type: ignore[union-attr]
    transport.send(ModuleSource(filled(3)), 3)
    transport.close()
    transport.close()
    wait_for(socket_dir / "r0")
    assert [ended(process) for process in processes] == [0, -signal.SIGKILL]
    assert (socket_dir / "r0").read_text() == "[1, 3] 3 3"


@pytest.mark.parametrize("way", PUSHED)
def test_unresponsive_receiver_is_named_and_kept(way: str, socket_dir: Path, control: ControlPlane) -> None:
    transport = transport_to(way, socket_dir, control, timeout=1.0)
    module = filled(0)
    receiver = receiver_of(way, socket_dir, module)
    assert not receiver.pending()
    with pytest.raises(RuntimeError, match=rf"receiver \S+:{os.getpid()} does not answer \(awaited: ready\)"):
        transport.send(ModuleSource(filled(1)), 1)
    assert receiver.pending()
    with pytest.raises(TimeoutError, match=r"no update within 0\.2 s"):
        receiver.receive(0.2)
    thread, came = receiving(receiver)
    transport.send(ModuleSource(filled(2)), 2)
    thread.join()
    assert (came, number(module)) == ([2], 2)
    transport.close()
    receiver.close()


@pytest.mark.parametrize("way", PUSHED)
def test_missing_peer_raises(way: str, socket_dir: Path, control: ControlPlane) -> None:
    transport = transport_to(way, socket_dir, control, timeout=0.2)
    with pytest.raises(RuntimeError, match=r"0 of 1 receivers have called .* within 0\.2 s"):
        transport.send(ModuleSource(filled(1)), 1)
    transport.close()
    with pytest.raises(PeerLostError, match=r"no trainer listens at .* after 0\.2 s"):
        receiver_of(way, socket_dir, filled(0), timeout=0.2)


@pytest.mark.parametrize("way", PUSHED)
def test_mismatched_weights_raise_on_both_sides(way: str, socket_dir: Path, control: ControlPlane) -> None:
    transport = transport_to(way, socket_dir, control)
    module = filled(0)
    receiver = receiver_of(way, socket_dir, module)
    for version, source, message in (
        (1, filled(1, "llama"), r"q_norm"),
        (2, filled(1, "qwen3_tied"), r"did not send 'lm_head\.weight'"),
    ):
        thread, came = receiving(receiver)
        with pytest.raises(ValueError, match=rf"receiver \S+: .*{message}.*version {version} was not sent"):
            transport.send(ModuleSource(source), version)
        thread.join()
        assert isinstance(came[0], ValueError)
        assert (number(module), receiver.version) == (0, None)
    thread, came = receiving(receiver)
    meta = transport.send(ModuleSource(filled(3)), 3)
    thread.join()
    assert (came, number(module)) == ([3], 3)
    assert meta.nbytes == sum(parameter.nbytes for parameter in module.parameters())
    transport.close()
    receiver.close()


def varied(seed: int) -> nn.Module:
    """Return a tiny model with distinct values."""
    made, generator = filled(0), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return made


@pytest.mark.parametrize("way", PUSHED)
def test_bucket_is_not_overwritten_before_slow_receiver_read_it(
    way: str, socket_dir: Path, control: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_slice = Staging.put_slice

    def slowly(staging: Staging, bucket_slice: BucketSlice, values: torch.Tensor) -> None:
        time.sleep(0.02)
        put_slice(staging, bucket_slice, values)

    monkeypatch.setattr(Staging, "put_slice", slowly)
    transport, source, module = transport_to(way, socket_dir, control), varied(1), filled(0)
    receiver = receiver_of(way, socket_dir, module)
    thread, came = receiving(receiver)
    transport.send(ModuleSource(source), 1)
    thread.join()
    assert came == [1]
    assert same_bits(module.state_dict(), source.state_dict())
    transport.close()
    receiver.close()


class Breaking:
    """Source that raises during iteration."""

    def named_tensors(self) -> Iterator[NamedTensor]:
        for i, named in enumerate(ModuleSource(filled(9)).named_tensors()):
            if i == 5:
                raise RuntimeError("the engine broke")
            yield named


@pytest.mark.parametrize("way", [*PUSHED, "disk", "direct"])
def test_failing_source_leaves_old_version(way: str, socket_dir: Path, tmp_path: Path, control: ControlPlane) -> None:
    module = filled(0)
    receiver: WeightReceiver | None = None
    transport: Transport
    if way == "direct":
        transport = DirectTransport(control, module)
    elif way == "disk":
        transport, receiver = (
            DiskTransport(control, tmp_path / "w", file_bytes=BUCKET),
            DiskReceiver(tmp_path / "w", module),
        )
    else:
        transport, receiver = transport_to(way, socket_dir, control), None
        receiver = receiver_of(way, socket_dir, module)
    thread, came = receiving(receiver) if receiver is not None else (None, [])
    for source, version in ((filled(1), 1), (None, 2), (filled(3), 3)):
        if source is None:
            with pytest.raises(RuntimeError, match=r"the engine broke.*version 2 was not sent"):
                transport.send(Breaking(), 2)
            assert number(module) == 1
            continue
        if version == 3 and receiver is not None:
            thread, came = receiving(receiver) if way == "disk" or not thread.is_alive() else (thread, came)
        transport.send(ModuleSource(source), version)
        if thread is not None:
            thread.join()
            assert came == [version]
            if version == 1 and way in PUSHED:
                thread, came = receiving(receiver)
        assert number(module) == version
    transport.close()


# ---- state left in the system


def test_socket_of_dead_trainer_is_replaced_and_of_living_one_raises(socket_dir: Path, control: ControlPlane) -> None:
    process = start(push_and_be_killed, "ipc", socket_dir, "ready")
    wait_for(socket_dir / "socket")
    with pytest.raises(ValueError, match=r"address = '.*socket' cannot be listened at"):
        SharedMemoryTransport(control, socket_dir / "socket")
    process.kill()
    ended(process)
    SharedMemoryTransport(control, socket_dir / "socket", observe=ignore).close()
    with pytest.raises(ValueError, match="too long for a socket"):
        SharedMemoryTransport(control, "/tmp/" + "x" * 100)


def test_shared_memory_is_anonymous(socket_dir: Path, control: ControlPlane) -> None:
    before = set(os.listdir("/dev/shm")) if Path("/dev/shm").is_dir() else set()
    transport, module = transport_to("ipc", socket_dir, control), filled(0)
    receiver = receiver_of("ipc", socket_dir, module)
    thread, _ = receiving(receiver)
    transport.send(ModuleSource(filled(1)), 1)
    thread.join()
    assert set(os.listdir("/dev/shm") if before else ()) <= before
    transport.close()
    receiver.close()
