"""A run whose server process is killed again and again: a client that only retries sees the bits of a run without kills."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest

from areal.tests.tinker.restarts.kills import KilledServer, RetryingClient, train
from areal.tests.tinker.sdk.server import model_with_tokenizer


@pytest.mark.own_world
@pytest.mark.timeout(3600)
def test_kills_of_the_process_change_no_bit(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    kills: int = pytestconfig.getoption("--kills")
    steps = 20 * kills // 3
    model = model_with_tokenizer(tmp_path / "model")
    chosen = random.Random(kills).sample(range(1, steps), kills + 1)
    ends = dict.fromkeys(chosen, signal.SIGKILL) | {chosen[0]: signal.SIGTERM}
    found = []
    # Snapshots are frequent, so that both they and the journal are used.
    options = ("--recovery-steps", "5", "--recovery-fraction", "1")
    for folder, chosen_ends in (("whole", {}), ("killed", ends)):
        server = KilledServer(tmp_path / folder, model, chosen_ends, options)
        try:
            found.append(train(RetryingClient(server.url), steps, server.before_step))
        finally:
            server.stop()
        assert server.ended == len(chosen_ends)
    assert found[0] == found[1]
