"""An owner and its servers: what is refused when it opens them, servers of others, and servers that were started anew."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from areal.tests.harness.limits import promptly, wait_until
from areal.tests.harness.servers.rollout_http import (
    PROMPT,
    Background,
    Process,
    assert_drawn_from,
    assert_true_versions,
    replica,
    run,
    weights,
)
from areal.tests.unit.inference.http.conftest import Make
from areal.tests.unit.inference.local.rollouts import endless

TOKENS, COMPLETIONS, LOAD, LABEL, PAUSE, RESUME = (
    "/inference/v1/generate",
    "/v1/completions",
    "/collective_rpc",
    "/update_weight_version",
    "/pause",
    "/resume",
)
OLDER = [TOKENS]
"""What a server without ``--enable-scale-out`` lacks."""


@pytest.fixture(params=["tokens", "completions"])
def either(request: pytest.FixtureRequest, vllm: Process) -> Process:
    """A server with the route for tokens, or without it."""
    vllm.tell(without=[] if request.param == "tokens" else OLDER)
    return vllm


# ---- refused


def test_log_probs_of_another_mode_are_refused_when_opened(make_vllm: Make, vllm: Process) -> None:
    vllm.tell(logprobs_mode="raw_logprobs")
    with pytest.raises(ValueError, match=rf"{vllm.url}: the server computes raw_logprobs.*--logprobs-mode processed"):
        make_vllm(vllm)


def test_answers_longer_than_the_context_are_refused(make_vllm: Make, either: Process) -> None:
    either.tell(context=30)
    rollout = make_vllm(either)
    with pytest.raises(
        ValueError, match=r"23 tokens of the prompt and Sampling.max_new_tokens = 8 are more than .* 30"
    ):
        run(rollout.generate(PROMPT, endless(8)))
    assert either.calls(TOKENS) == either.calls(COMPLETIONS) == 0
    assert len(run(rollout.generate(PROMPT, endless(7)))[0].tokens) == 7


def test_directory_that_lacks_a_weight_is_refused(make_vllm: Make, vllm: Process) -> None:
    """The server would keep its old value, and say that all is well."""
    rollout = make_vllm(vllm)
    some = (named for named in weights(1) if "k_proj" not in named.name)
    with pytest.raises(ValueError, match=r"version-00000001 lacks 'model.layers.0.self_attn.k_proj.*send all tensors"):
        rollout.update(some, 1)
    assert vllm.calls(LOAD) == 0
    (answer,) = run(rollout.generate(PROMPT, endless(5)))
    assert answer.versions == (0,) * 5
    assert_drawn_from(replica(), answer)


def test_two_owners_of_one_server_are_refused(make_vllm: Make, either: Process) -> None:
    first = make_vllm(either)
    with pytest.raises(ValueError, match=rf"{either.url}: it belongs to another HTTPRollout, in process {os.getpid()}"):
        make_vllm(either)
    (answer,) = run(first.generate(PROMPT, endless(5)))
    assert answer.versions == (0,) * 5
    first.close()
    assert len(run(make_vllm(either).generate(PROMPT, endless(5)))[0].tokens) == 5


def test_server_of_an_owner_whose_process_has_ended_is_taken(make_vllm: Make, vllm: Process) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    vllm.tell(label=f"areal/{socket.gethostname()}/{ended.pid}/12ab/7")
    make_vllm(vllm).close()
    # On another host it may be alive.
    vllm.tell(label=f"areal/elsewhere/{ended.pid}/12ab/7")
    with pytest.raises(ValueError, match=r"process \d+ of host elsewhere.*take_over=True"):
        make_vllm(vllm)
    rollout = make_vllm(vllm, take_over=True, version=7)
    assert run(rollout.generate(PROMPT, endless(3)))[0].versions == (7,) * 3


def test_server_that_an_ended_owner_left_paused_is_resumed(make_vllm: Make, either: Process) -> None:
    """Its process ended between the pause and the resume of an update."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    either.tell(label=f"areal/{socket.gethostname()}/{ended.pid}/12ab/7")
    either.post("/pause?mode=abort")
    rollout = make_vllm(either, version=7, deadline=5)
    assert either.calls(RESUME) == 1
    (answer,) = run(rollout.generate(PROMPT, endless(3)))
    assert answer.versions == (7,) * 3


def test_server_interrupted_in_an_update_of_another_owner_needs_an_update(make_vllm: Make, vllm: Process) -> None:
    """A group update that did not end leaves layers without weights."""
    vllm.tell(label="interrupted")
    rollout = make_vllm(vllm)
    with pytest.raises(RuntimeError, match=rf"{vllm.url} was interrupted in an update.*: send an update"):
        run(rollout.generate(PROMPT, endless(3)))
    assert vllm.calls(TOKENS) == 0
    rollout.update(weights(1), 1)
    (answer,) = run(rollout.generate(PROMPT, endless(3)))
    assert answer.versions == (1,) * 3


def test_owner_notices_that_another_has_taken_its_server(make_vllm: Make, either: Process) -> None:
    first = make_vllm(either)
    run(first.generate(PROMPT, endless(3)))
    second = make_vllm(either, take_over=True)
    either.tell(step_seconds=0.05)
    background = Background(second.generate(PROMPT, endless(5)))
    wait_until(lambda: either.calls(TOKENS) + either.calls(COMPLETIONS) == 2)
    # Its connection is used by nobody: a new one is checked before its reply counts.
    with pytest.raises(RuntimeError, match=rf"{either.url} belongs to another HTTPRollout now"):
        run(*(first.generate(PROMPT, endless(3)) for _ in range(2)))
    with pytest.raises(RuntimeError, match="belongs to another HTTPRollout now"):
        first.update(weights(1), 1)
    # The label of the other stays.
    first.close()
    run(*(second.generate(PROMPT, endless(3)) for _ in range(2)))
    assert second.counts["restarted"] == 0
    assert_drawn_from(replica(), background.result()[0])


# ---- started anew


def test_restarted_server_gets_the_current_weights_before_its_next_token(make_vllm: Make, either: Process) -> None:
    rollout = make_vllm(either)
    rollout.update(weights(1), 5)
    run(rollout.generate(PROMPT, endless(3)))
    either.tell(step_seconds=0.05)
    background = Background(*(rollout.generate(PROMPT, endless(30, seed=seed)) for seed in range(3)))
    wait_until(lambda: either.calls(TOKENS) + either.calls(COMPLETIONS) == 4)
    either.restart()
    for answer in background.result():
        assert answer.versions == (5,) * 30
        assert_drawn_from(replica(1), answer)
    assert either.calls(LOAD) == 1
    assert rollout.counts["restarted"] == 1
    assert rollout.counts["failed"] == 3


def test_restart_between_two_requests_is_noticed(make_vllm: Make, either: Process) -> None:
    """No request fails: the connection is opened again without a word."""
    rollout = make_vllm(either)
    rollout.update(weights(1), 5)
    run(rollout.generate(PROMPT, endless(3)))
    either.restart()
    (answer,) = run(rollout.generate(PROMPT, endless(10)))
    assert answer.versions == (5,) * 10
    assert_drawn_from(replica(1), answer)
    assert (rollout.counts["restarted"], rollout.counts["discarded"]) == (1, 1)


@pytest.mark.parametrize("without", [[], OLDER], ids=["tokens", "completions"])
def test_requests_on_a_restarted_server_are_interrupted_before_it_loads(
    make_vllm: Make, vllm: Process, without: list[str]
) -> None:
    """The long one began with the weights of the start. Its tokens so far do not count, although it ends after the load."""
    vllm.tell(without=without)
    rollout = make_vllm(vllm)
    rollout.update(weights(1), 1)
    run(rollout.generate(PROMPT, endless(3)))
    vllm.restart()
    vllm.tell(without=without, step_seconds=0.05)
    long = Background(rollout.generate(PROMPT, endless(60, seed=1)))
    wait_until(lambda: vllm.calls(TOKENS) + vllm.calls(COMPLETIONS) == 1)
    (short,) = run(rollout.generate(PROMPT, endless(3, seed=2)))
    for answer in (short, *long.result()):
        assert set(answer.versions) == {1}
        assert_true_versions(answer)
    assert [vllm.calls(route) for route in (PAUSE, LOAD, RESUME)] == [1, 1, 1]
    assert (rollout.counts["restarted"], rollout.counts["discarded"]) == (1, 2)


def test_restarted_server_that_refuses_the_weights_does_not_stay_paused(make_vllm: Make, vllm: Process) -> None:
    """It has no label yet, so that the owner after this one could not know."""
    rollout = make_vllm(vllm)
    rollout.update(weights(1), 1)
    vllm.restart()
    vllm.can(LOAD, status=400, body="no memory")
    with pytest.raises(RuntimeError, match=r"no server has known weights: .*no memory"):
        run(rollout.generate(PROMPT, endless(3)))
    assert [vllm.calls(route) for route in (PAUSE, LOAD, RESUME)] == [1, 1, 1]
    rollout.update(weights(2), 2)
    (answer,) = run(rollout.generate(PROMPT, endless(3)))
    assert answer.versions == (2,) * 3
    assert_drawn_from(replica(2), answer)


def test_restart_before_the_first_update_brings_the_same_weights_back(make_vllm: Make, vllm: Process) -> None:
    rollout = make_vllm(vllm, version=3)
    vllm.restart()
    (answer,) = run(rollout.generate(PROMPT, endless(10)))
    assert answer.versions == (3,) * 10
    assert_drawn_from(replica(), answer)
    assert vllm.calls(LOAD) == 0


def test_server_that_is_not_there_yet_is_examined_when_it_is(make_vllm: Make, vllm: Process) -> None:
    vllm.kill()
    rollout = make_vllm(vllm)
    background = Background(rollout.generate(PROMPT, endless(5)))
    wait_until(lambda: rollout.counts["away"] == 1)
    vllm.restart()
    assert_drawn_from(replica(), background.result()[0])
    assert vllm.calls(LABEL) == 1


def test_answers_in_the_line_end_when_another_owner_takes_the_server(make_vllm: Make, vllm: Process) -> None:
    vllm.tell(step_seconds=0.1)
    rollout = make_vllm(vllm, max_requests=1, deadline=3, timeout=2)
    drawn = vllm.drawn()
    answers = [Background(rollout.generate(PROMPT, endless(40, seed=seed))) for seed in range(3)]
    wait_until(lambda: vllm.drawn() > drawn + 2)
    make_vllm(vllm, take_over=True)
    for answer in answers:
        with promptly(), pytest.raises(RuntimeError, match="belongs to another HTTPRollout now"):
            answer.result()
