"""Updates during which connections break off."""

from __future__ import annotations

import threading

import pytest

from areal.inference.http import VLLM, HTTPRollout, SGLang
from areal.tests.harness.limits import promptly, wait_until
from areal.tests.harness.servers.rollout_http import PROMPT, Process, assert_drawn_from, replica, run, weights
from areal.tests.unit.inference.http.conftest import Make
from areal.tests.unit.inference.local.rollouts import endless

LOAD, LABEL, PAUSE, RESUME = "/collective_rpc", "/update_weight_version", "/pause", "/resume"


def failure_of_update(rollout: HTTPRollout) -> str:
    try:
        rollout.update(weights(1), 1)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("route", "fault"),
    [
        (PAUSE, "lost"),
        (LOAD, "lost"),
        (LABEL, "lost"),
        (RESUME, "lost"),
        (PAUSE, "500"),
        (LABEL, "500"),
        (RESUME, "500"),
    ],
)
def test_request_of_an_update_is_repeated(make_vllm: Make, vllm: Process, route: str, fault: str) -> None:
    """A load that fails with status 500 is not: it would fail again."""
    rollout = make_vllm(vllm)
    if fault == "lost":
        vllm.lose(route)
    else:
        vllm.can(route, status=500, body="not now")
    assert failure_of_update(rollout) == ""
    (answer,) = run(rollout.generate(PROMPT, endless(3)))
    assert answer.versions == (1,) * 3
    assert_drawn_from(replica(1), answer)
    assert vllm.calls(LOAD) == (2 if route == LOAD else 1)
    assert rollout.counts["restarted"] == 0


def test_server_started_anew_between_load_and_label_loads_again(make_vllm: Make, vllm: Process) -> None:
    """Its label tells that it has other weights."""
    rollout = make_vllm(vllm)
    vllm.can(LABEL, delay=60)
    update = threading.Thread(target=rollout.update, args=(weights(1), 1))
    update.start()
    wait_until(lambda: vllm.calls(LABEL) == 2)
    vllm.restart()
    with promptly():
        update.join()
    (answer,) = run(rollout.generate(PROMPT, endless(3)))
    assert answer.versions == (1,) * 3
    assert_drawn_from(replica(1), answer)
    assert vllm.calls(LOAD) == 1
    assert rollout.counts["restarted"] == 1


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_first_load_without_a_reply_leaves_a_server_out(
    make_vllm: Make, vllm: Process, sglang: Process, kind: str
) -> None:
    """It may have the new weights, and must not go on as the one that has those of its start. The next update brings it back."""
    server, dialect, load = (vllm, VLLM(), LOAD) if kind == "vllm" else (sglang, SGLang(), "/update_weights_from_disk")
    rollout = make_vllm(server, dialect=dialect, update_seconds=1.0)
    server.lose(load, times=99)
    assert failure_of_update(rollout)
    with promptly(), pytest.raises(RuntimeError, match="no server has known weights"):
        run(rollout.generate(PROMPT, endless(3)))
    server.tell(reset=True)
    rollout.update(weights(2), 2)
    (answer,) = run(rollout.generate(PROMPT, endless(3)))
    assert answer.versions == (2,) * 3
    assert_drawn_from(replica(2), answer)
