"""SGLang 0.5.23: its owner, pauses, adapters, log-probs and releases. What it has in common with vLLM is in ``test_servers.py``."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
import torch

from areal.inference.http import SGLang
from areal.tests.harness.limits import wait_until
from areal.tests.harness.servers.rollout_http import (
    PROMPT,
    Background,
    Process,
    assert_drawn_from,
    plain,
    replica,
    run,
    weights,
)
from areal.tests.unit.inference.http.conftest import Make
from areal.tests.unit.inference.local.rollouts import endless

GENERATE, LOAD = "/generate", "/update_weights_from_disk"


def test_owner_is_known_and_a_restart_is_noticed(make_vllm: Make, sglang: Process) -> None:
    rollout = make_vllm(sglang, dialect=SGLang())
    with pytest.raises(ValueError, match=f"it belongs to another HTTPRollout, in process {os.getpid()}"):
        make_vllm(sglang, dialect=SGLang())
    rollout.update(weights(1), 4)
    run(rollout.generate(PROMPT, endless(3)))
    sglang.tell(label="default")  # as one that was started anew says
    (answer,) = run(rollout.generate(PROMPT, endless(5)))
    assert answer.versions == (4,) * 5
    assert_drawn_from(replica(1), answer)
    assert sglang.calls(LOAD) == 2
    assert (rollout.counts["restarted"], rollout.counts["discarded"]) == (1, 1)
    # Routes that are deprecated have others in their place.
    assert not {"/get_model_info", "/get_server_info"} & set(sglang.told()["calls"])


def test_server_that_an_ended_owner_left_paused_is_resumed(make_vllm: Make, sglang: Process) -> None:
    """Its process ended between the pause and the continuation of an update."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    sglang.tell(label=f"areal/{socket.gethostname()}/{ended.pid}/12ab/7")
    sglang.post("/pause_generation", mode="retract")
    rollout = make_vllm(sglang, dialect=SGLang(), version=7, deadline=5)
    assert sglang.calls("/continue_generation") == 1
    assert run(rollout.generate(PROMPT, endless(3)))[0].versions == (7,) * 3


def test_vllm_without_labels_that_was_left_paused_is_resumed(make_vllm: Make, sglang: Process) -> None:
    """Nothing tells whether an owner has paused it."""
    sglang.post("/pause?mode=abort")
    assert run(make_vllm(sglang, deadline=5).generate(PROMPT, endless(3)))[0].versions == (0,) * 3


def test_failed_load_leaves_requests_that_wait_with_the_version_before(make_vllm: Make, sglang: Process) -> None:
    rollout = make_vllm(sglang, dialect=SGLang())
    rollout.update(weights(1), 1)
    sglang.tell(step_seconds=0.03)
    drawn = sglang.drawn()
    background = Background(rollout.generate(PROMPT, endless(30, seed=1, top_k=9)))
    wait_until(lambda: sglang.drawn() >= drawn + 2)
    sglang.can(LOAD, status=400, body='{"success": false, "message": "no module named foo"}')
    with pytest.raises(RuntimeError, match=rf"(?s)no module named foo.*{sglang.url} serves version 1"):
        rollout.update(weights(2), 2)
    (answer,) = background.result()
    assert answer.versions == (1,) * 30
    assert sglang.calls(GENERATE) == 1


def test_log_probs_under_top_p_are_of_the_tokens_that_are_left(make_vllm: Make, sglang: Process) -> None:
    (answer,) = run(
        make_vllm(sglang, dialect=SGLang()).generate(PROMPT, endless(12, 0.5, top_p=0.3, seed=1, top_logprobs=112))
    )
    rows = plain(replica(), PROMPT, answer.tokens, 0.5)
    assert min(len(top.ids) for top in answer.top) < 112
    for token, logprob, top, row in zip(answer.tokens, answer.logprobs, answer.top, rows, strict=True):
        left = torch.tensor(top.ids)
        assert row[left].exp().sum() >= 0.3 - 1e-6 >= row[left[:-1]].exp().sum() - 1e-6
        wanted = row[left].log_softmax(-1)
        torch.testing.assert_close(torch.tensor(top.logprobs), wanted, rtol=0, atol=1e-5)
        assert logprob == pytest.approx(float(wanted[top.ids.index(token)]), abs=1e-5)


def test_more_tokens_than_the_server_returns_are_refused_with_its_words(make_vllm: Make, sglang: Process) -> None:
    sglang.tell(mask_tokens=5)
    rollout = make_vllm(sglang, dialect=SGLang())
    with pytest.raises(ValueError, match="Sampling support exceeds --sampling-mask-max-tokens=5"):
        run(rollout.generate(PROMPT, endless(4, top_p=0.9)))
    assert len(run(rollout.generate(PROMPT, endless(4, top_k=5)))[0].tokens) == 4


def test_masked_log_probs_that_are_missing_are_an_error(make_vllm: Make, sglang: Process) -> None:
    """Those of all tokens would be of another distribution."""
    rollout = make_vllm(sglang, dialect=SGLang())
    spans = [{"version": sglang.told()["label"], "start": 0, "end": 1}]
    meta = {"finish_reason": {"type": "length"}, "output_token_logprobs": [[-1.0, 5, None]], "weight_versions": spans}
    for more, words in (
        ({}, "output_token_sampling_logprobs is missing"),
        ({"output_token_sampling_mask": [[6]], "output_token_sampling_logprobs": [-1.0]}, "5 is not in its sampling"),
        ({"output_token_sampling_mask": [], "output_token_sampling_logprobs": [-1.0]}, "1 tokens came with sampling"),
    ):
        sglang.can(GENERATE, body={"meta_info": meta | more})
        with pytest.raises(RuntimeError, match=words):
            run(rollout.generate(PROMPT, endless(1, top_k=3)))


def test_answers_longer_than_the_context_are_refused(make_vllm: Make, sglang: Process) -> None:
    sglang.tell(context=30)
    rollout = make_vllm(sglang, dialect=SGLang())
    with pytest.raises(ValueError, match=r"Sampling.max_new_tokens = 8 are more than the server's context of 30"):
        run(rollout.generate(PROMPT, endless(8)))
    assert sglang.calls(GENERATE) == 0


def test_older_releases_and_servers_without_adapters_are_refused(make_vllm: Make, sglang: Process) -> None:
    sglang.tell(release="0.5.9.post2")
    with pytest.raises(ValueError, match=rf"{sglang.url}: SGLang 0.5.9.post2: install 0.5.23 or newer on the server"):
        make_vllm(sglang, dialect=SGLang())
    for release in ("0.5.24.dev123+gabc", "0.0.0.dev0"):
        sglang.tell(release=release)
        make_vllm(sglang, dialect=SGLang()).close()
    sglang.tell(lora=False)
    with pytest.raises(ValueError, match=r"SGLang.adapter = 'policy': the server cannot load adapters.*--enable-lora"):
        make_vllm(sglang, dialect=SGLang(adapter="policy"))
