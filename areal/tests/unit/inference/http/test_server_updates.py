"""Updates of servers that misbehave: requests that come late, loads that fail, and weights that are not finite."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from areal.inference.http import VLLM, HTTPRollout
from areal.inference.protocol import Sampling
from areal.tests.grid.models import model_dir
from areal.tests.harness.limits import promptly, wait_until
from areal.tests.harness.servers.rollout_http import (
    PROMPT,
    Background,
    Process,
    assert_drawn_from,
    replica,
    run,
    weights,
)
from areal.tests.unit.inference.local.rollouts import endless

COMPLETIONS, LOAD = "/v1/completions", "/collective_rpc"


@pytest.fixture
def server(sglang: Process) -> Process:
    """Asked here as a vLLM without labels."""
    return sglang


@pytest.fixture
def make(server: Process, tmp_path: Path) -> Iterator[Callable[..., HTTPRollout]]:
    made: list[HTTPRollout] = []

    def make_one(**options: Any) -> HTTPRollout:
        options = {"model": model_dir("qwen3"), "timeout": 30, "deadline": 30, "update_seconds": 20, **options}
        made.append(HTTPRollout(server.url, VLLM(), folder=tmp_path / "weights", **options))
        return made[-1]

    yield make_one
    for rollout in made:
        rollout.close()


def test_requests_that_arrive_after_a_pause_do_not_hold_up_the_update(
    make: Callable[..., HTTPRollout], server: Process
) -> None:
    """They wait on the server. The next pause sends them back, and they are asked again."""
    rollout = make(drain_seconds=60)
    server.tell(late_seconds=0.5)
    background = Background(*(rollout.generate(PROMPT, endless(3, seed=seed)) for seed in range(4)))
    wait_until(lambda: server.calls(COMPLETIONS) == 4)
    with promptly():
        rollout.update(weights(1), 1)
    for answer in background.result():
        assert answer.versions == (1,) * 3
        assert_drawn_from(replica(1), answer)
    assert server.calls("/pause") > 1
    assert server.calls(COMPLETIONS) == 8


def test_undrained_request_is_restarted_after_update(make: Callable[..., HTTPRollout], server: Process) -> None:
    rollout = make(drain_seconds=0.3)
    server.can(COMPLETIONS, body="late", delay=5)
    background = Background(rollout.generate(PROMPT, endless(5, seed=1)))
    wait_until(lambda: server.calls(COMPLETIONS) == 1)
    rollout.update(weights(1), 1)
    (answer,) = background.result()
    assert answer.versions == (1,) * 5
    assert_drawn_from(replica(1), answer)


def test_load_that_cannot_succeed_ends_with_the_servers_words(
    make: Callable[..., HTTPRollout], server: Process
) -> None:
    rollout = make()
    server.can(LOAD, status=500, body="Attempted to load weight (torch.Size([64]))", times=9)
    with pytest.raises(RuntimeError, match=r"status 500: Attempted to load weight \(torch.Size\(\[64\]\)\).*left out"):
        rollout.update(weights(1), 1)
    assert server.calls(LOAD) == 1
    server.tell(reset=True)
    # A server that is not ready, or is gone for a moment, is asked again. Its own words are kept.
    server.can(LOAD, status=503, body="starting", times=2)
    rollout.update(weights(1), 1)
    assert server.calls(LOAD) == 3
    server.tell(reset=True)
    impatient = make(update_seconds=1.0)
    server.can(LOAD, status=503, body="starting")
    server.can(LOAD, body="late", delay=2.0)
    with pytest.raises(RuntimeError, match="status 503: starting"):
        impatient.load("/nowhere", 2)


def test_version_before_is_loaded_again_after_a_failed_load(make: Callable[..., HTTPRollout], server: Process) -> None:
    """A failed load leaves weights with which the next forward would end the server. It may fail more than once."""
    rollout = make()
    rollout.update(weights(1), 1)
    for version in (2, 3):
        server.can(LOAD, status=500, body="no module named 'foo'")
        with pytest.raises(RuntimeError, match=rf"(?s)no module named 'foo'.*{server.url} serves version 1"):
            rollout.update(weights(2), version)
    assert server.calls(LOAD) == 5
    (answer,) = run(rollout.generate(PROMPT, endless(5, seed=1)))
    assert answer.versions == (1,) * 5
    assert_drawn_from(replica(1), answer)


def test_weights_that_are_not_finite_stop_the_run(make: Callable[..., HTTPRollout], server: Process) -> None:
    """And are no ValueError, which fails one episode only."""
    server.can(COMPLETIONS, status=400, body="Out of range float values are not JSON compliant: nan")
    with pytest.raises(RuntimeError, match=r"version 7 gives log-probs that are not finite: .*Out of range"):
        run(make(version=7).generate(PROMPT, endless(3)))


def test_what_vllm_would_draw_otherwise_is_refused(make: Callable[..., HTTPRollout], server: Process) -> None:
    rollout = make()
    with pytest.raises(ValueError, match=r"Sampling.temperature = 0.005: vLLM draws at 0.01"):
        run(rollout.generate(PROMPT, Sampling(4, 0.005)))
    assert server.calls(COMPLETIONS) == 0
    for seed in (-1, 2**63):
        (answer,) = run(rollout.generate(PROMPT, endless(3, seed=seed)))
        assert len(answer.tokens) == 3


def test_key_is_sent_with_every_request(make: Callable[..., HTTPRollout], server: Process) -> None:
    rollout = make(api_key="of-mine")
    run(rollout.generate(PROMPT, endless(3)))
    rollout.update(weights(1), 1)
    assert server.told()["keys"] == ["Bearer of-mine"]
