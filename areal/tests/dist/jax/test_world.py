"""Worlds of JAX processes: joining, refusals, the loss of ranks, and the end of processes."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

pytest.importorskip("jax")

import jax
import jax.numpy as jnp
from torch import Tensor

from areal.api import Batch, FinetuneSpec, TokenOutputs
from areal.engine.jax.runtime import coordinator
from areal.engine.registry import create_engine
from areal.tests.harness.limits import PROMPTLY, promptly, wait_until
from areal.tests.harness.processes import needs_own_world, run_world, succeed
from areal.tests.harness.tiny import config, global_batch, local_batch, loss
from areal.tests.harness.world import world as ranks
from areal.utils.distributed import RankLostError

pytestmark = needs_own_world


def spec() -> FinetuneSpec:
    return FinetuneSpec(total_train_steps=100)


def trained(backend: str, steps: int = 1, **options: Any) -> list[float]:
    """Return the losses of an engine's first steps."""
    engine = create_engine(config(backend, **options))
    engine.initialize(spec())
    losses = [engine.train_batch(local_batch(engine, global_batch()), loss).loss for _ in range(steps)]
    engine.destroy()
    return losses


# ---- joining


def join_two_engines() -> None:
    """Train two engines of one world, one after the other, and check what the process looks like."""
    first = trained("jax:d2")
    assert jax.process_count() == 2
    assert len(jax.local_devices()) == 1
    assert trained("jax:d2") == first
    # A SIGTERM of a launcher ends a rank, although JAX has a service that would only note it.
    if ranks().rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)


def test_engines_share_the_world_of_their_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=3")
    ended = run_world(2, join_two_engines)
    assert [rank.code for rank in ended] == [0, -signal.SIGTERM], "\n".join(rank.output for rank in ended)


def refused(match: str) -> None:
    """Check that an engine is refused on this rank, in time."""
    engine = create_engine(config("jax:d2"))
    with promptly(), pytest.raises(ValueError, match=match):
        engine.initialize(spec())
    engine.destroy()


def use_jax_too_early() -> None:
    if ranks().rank == 1:
        jnp.zeros(1).block_until_ready()
    refused(r"rank 1: JAX was used in this process before it joined a world of 2: create the engine before")


def join_another_size(port: int) -> None:
    if ranks().rank == 0:
        jax.distributed.initialize(f"localhost:{port}", 1, 0)
    refused(r"rank 0: this process is rank 0 of 1 in JAX, and rank 0 of 2 in torch.distributed")


def join_with_bad_addresses(taken: int) -> None:
    for address, match in {
        "10.0.0.1": "jax.coordinator = '10.0.0.1': expected 'host:port'",
        f"localhost:{taken}": f"could not start at port {taken}: .*in use",
    }.items():
        engine = create_engine(config("jax:d2", jax={"coordinator": address}))
        with promptly(), pytest.raises((ValueError, RuntimeError), match=match):
            engine.initialize(spec())
        engine.destroy()


@pytest.mark.parametrize(
    "case", [use_jax_too_early, join_another_size, join_with_bad_addresses], ids=lambda f: f.__name__
)
def test_world_that_cannot_be_joined_is_refused_on_every_rank(case: Callable[..., None]) -> None:
    with socket.create_server(("", 0)) as listener:
        port = listener.getsockname()[1]
        if case is join_another_size:
            listener.close()
        succeed(2, case, *([] if case is use_jax_too_early else [port]))


def train_at(port: int) -> None:
    trained("jax:d2", jax={"coordinator": f"127.0.0.1:{port}"})


def test_coordinator_listens_where_the_configuration_says() -> None:
    with socket.create_server(("", 0)) as listener:
        port = listener.getsockname()[1]
    succeed(2, train_at, port)


def listens(port: int) -> bool:
    try:
        socket.create_connection(("localhost", port), timeout=1).close()
    except OSError:
        return False
    return True


def test_coordinator_outlives_ranks_and_ends_with_the_last() -> None:
    first, second = (coordinator.start(0, 2, 100) for _ in range(2))
    assert first.port != second.port
    lines = [socket.create_connection(("localhost", first.lifeline)) for _ in range(2)]
    lines[0].close()
    time.sleep(0.3)
    with pytest.raises(RuntimeError, match=f"port {first.port}"):
        coordinator.start(first.port, 2, 100)
    lines[1].close()
    wait_until(lambda: not listens(first.port), "the service of a world without ranks has ended", PROMPTLY)
    socket.create_connection(("localhost", second.lifeline)).close()


# ---- the loss of a rank


def lose(dead: int, signal_number: int, where: str) -> None:
    """Lose a rank. The others must name it in time, live on, and end without an error."""
    engine = create_engine(config("jax:d2", heartbeat_timeout=3.0))
    engine.initialize(spec())
    batch = local_batch(engine, global_batch())
    engine.train_batch(batch, loss)
    pids = engine.control.gather(os.getpid())

    def die(out: TokenOutputs, mb: Batch) -> Tensor:
        if ranks().rank == dead:
            os.kill(os.getpid(), signal_number)
        return loss(out, mb)

    if where == "between calls" and ranks().rank == dead:
        os.kill(os.getpid(), signal_number)
    with promptly(), pytest.raises(RankLostError, match=f"rank {dead} of 2 is gone"):
        engine.train_batch(batch, die)
    with pytest.raises(RuntimeError, match=f"cannot be used: rank {dead} of 2 is gone.* restart the job"):
        engine.train_batch(batch, loss)
    engine.destroy()
    # JAX of the surviving process can be used on its own. A stopped rank ends now.
    with suppress(ProcessLookupError):
        os.kill(pids[dead], signal.SIGKILL)
    assert float(jnp.ones(3).sum()) == 3.0
    time.sleep(2)
    print("LIVES", flush=True)
    sys.exit(0)


@pytest.mark.parametrize(
    ("dead", "number", "where"),
    [
        (0, signal.SIGKILL, "in a loss"),
        pytest.param(1, signal.SIGKILL, "between calls"),
        pytest.param(1, signal.SIGKILL, "in a loss"),
        (1, signal.SIGSTOP, "in a loss"),
        pytest.param(0, signal.SIGSTOP, "in a loss"),
    ],
    ids=str,
)
def test_loss_of_a_rank_is_named_and_the_others_live_on(dead: int, number: int, where: str) -> None:
    ended = run_world(2, lose, dead, number, where, timeout=120)
    assert ended[dead].code == -signal.SIGKILL or ended[dead].code == -number
    survivor = ended[1 - dead]
    assert survivor.code == 0, survivor.output
    assert survivor.output.splitlines()[-1] == "LIVES", survivor.output
