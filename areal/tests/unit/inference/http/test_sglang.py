"""SGLang 0.5.23: its owner, pauses, adapters, log-probs and releases. What it has in common with vLLM is in ``test_servers.py``."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from areal import LoRAConfig
from areal.api.weights import NamedTensor
from areal.inference.http import SGLang
from areal.tests.grid.models import VOCAB, adapter_dir, model_dir
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


def test_more_tokens_than_the_server_returns_are_an_error(make_vllm: Make, sglang: Process) -> None:
    """A mask needs a limit, which would change the distribution."""
    sglang.tell(mask_tokens=5)
    rollout = make_vllm(sglang, dialect=SGLang())
    with pytest.raises(RuntimeError, match=r"top_p = 0.9 leaves 5 tokens or more.*--sampling-mask-max-tokens"):
        run(rollout.generate(PROMPT, endless(4, top_p=0.9)))
    assert len(run(rollout.generate(PROMPT, endless(4, top_k=5)))[0].tokens) == 4
    with pytest.raises(ValueError, match=r"1 < top_k <= 5; got top_k=6. Lower top_k or increase --sampling-mask"):
        run(rollout.generate(PROMPT, endless(4, top_k=6)))


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
    """Six tokens of the context must be left, and a prompt that continues an answer counts with the tokens so far."""
    sglang.tell(context=36)
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


def test_token_outside_the_vocabulary_is_refused(make_vllm: Make, sglang: Process) -> None:
    """It would end the server, and after it each of the others."""
    rollout = make_vllm(sglang, dialect=SGLang())
    with pytest.raises(ValueError, match=rf"prompt_ids has the token {VOCAB}, and the model a vocabulary of {VOCAB}"):
        run(rollout.generate([5, VOCAB], endless(4)))
    assert sglang.calls(GENERATE) == 0
    assert len(run(rollout.generate([5, VOCAB - 1], endless(4)))[0].tokens) == 4


@pytest.mark.parametrize("fault", ["name", "shape"])
def test_directory_that_does_not_fit_is_refused(make_vllm: Make, sglang: Process, fault: str) -> None:
    """The server would keep the old value under the label of the new version, or end."""
    rollout = make_vllm(sglang, dialect=SGLang())
    rollout.update(weights(1), 1)

    def wrong() -> Iterator[NamedTensor]:
        for named in weights(2):
            if "layers.0.self_attn.k_proj" not in named.name:
                yield named
            elif fault == "name":
                yield named._replace(name=named.name.replace("k_proj", "foo"))
            else:
                yield named._replace(tensor=named.tensor[:-1])

    words = "layers.0.self_attn.foo.weight" if fault == "name" else "layers.0.self_attn.k_proj.weight"
    with pytest.raises(
        ValueError, match=rf"lacks 'model.layers.0.self_attn.k_proj.weight'.*model has no 'model.{words}"
    ):
        rollout.update(wrong(), 2)
    assert sglang.calls(LOAD) == 1
    assert run(rollout.generate(PROMPT, endless(4)))[0].versions == (1,) * 4


def test_log_probs_that_are_missing_are_not_finite(make_vllm: Make, sglang: Process) -> None:
    """The server writes null for NaN."""
    rollout = make_vllm(sglang, dialect=SGLang())
    spans = [{"version": sglang.told()["label"], "start": 0, "end": 1}]
    meta = {"finish_reason": {"type": "length"}, "output_token_logprobs": [[None, 0, None]], "weight_versions": spans}
    sglang.can(GENERATE, body={"meta_info": meta})
    with pytest.raises(RuntimeError, match="version 0 gives log-probs that are not finite"):
        run(rollout.generate(PROMPT, endless(1)))
    masks = {"output_token_sampling_mask": [[0, 1]], "output_token_sampling_logprobs": [[None, None]]}
    sglang.can(GENERATE, body={"meta_info": meta | masks})
    with pytest.raises(RuntimeError, match="version 0 gives log-probs that are not finite"):
        run(rollout.generate(PROMPT, endless(1, top_k=2, top_logprobs=1)))


@pytest.mark.parametrize(
    ("layers", "lacks"), [("v_proj", "q_proj"), ("k_proj", "q_proj"), ("q_proj", "v_proj"), ("up_proj", "gate_proj")]
)
def test_adapter_whose_layers_cannot_be_stacked_is_refused(
    make_vllm: Make, sglang: Process, layers: str, lacks: str
) -> None:
    """The server would load most of them, and end at the next request."""
    rollout = make_vllm(sglang, dialect=SGLang(adapter="policy"))
    folder = adapter_dir(model_dir("qwen3"), LoRAConfig(rank=4, target_modules=(layers,)))
    with pytest.raises(RuntimeError, match=rf"{layers}' without '{lacks}', and SGLang stacks both"):
        rollout.load(folder, 1)
    assert sglang.calls("/load_lora_adapter") == 0
    rollout.load(adapter_dir(model_dir("qwen3"), LoRAConfig(rank=4, target_modules=("q_proj", "v_proj"))), 2)
    assert run(rollout.generate(PROMPT, endless(4)))[0].versions == (2,) * 4


def test_server_that_refuses_to_sleep_goes_on(sglang: Process, make_vllm: Make) -> None:
    """It has no backup of its weights, and must not be woken as if it had slept."""
    rollout = make_vllm(sglang, dialect=SGLang())
    sglang.can("/release_memory_occupation", status=500, body="the memory saver is off")
    with pytest.raises(RuntimeError, match="the memory saver is off"):
        rollout.sleep()
    assert sglang.calls("/resume_memory_occupation") == 0
    (answer,) = run(rollout.generate(PROMPT, endless(3)))
    assert answer.versions == (0,) * 3


def test_sleep_waits_for_answers_that_are_being_cancelled(sglang: Process, make_vllm: Make) -> None:
    """Their caller has left, and the server is still told to end them."""
    rollout = make_vllm(sglang, dialect=SGLang())
    sglang.tell(step_seconds=0.1)

    async def leave() -> None:
        answer = asyncio.ensure_future(rollout.generate(PROMPT, endless(40)))
        drawn = await asyncio.to_thread(sglang.drawn)
        while await asyncio.to_thread(sglang.drawn) <= drawn:
            await asyncio.sleep(0.02)
        await asyncio.to_thread(sglang.can, "/abort_request", delay=0.5)
        answer.cancel()

    asyncio.run(leave())
    rollout.sleep()
    rollout.wake()
