"""Stop strings of requests to servers, and the most likely tokens of a current vLLM. Those of others are in ``test_servers.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from areal.inference.http import VLLM, SGLang
from areal.tests.harness.servers.rollout_http import PROMPT, Process, plain, replica, run, sglang_reply
from areal.tests.harness.servers.tokenizers import with_tokenizer
from areal.tests.unit.inference.http.conftest import Make
from areal.tests.unit.inference.local.rollouts import endless, shortest, tokenizer

ROUTES = {"tokens": "/inference/v1/generate", "completions": "/v1/completions", "sglang": "/generate"}


@pytest.mark.parametrize("kind", ROUTES)
def test_stop_string_ends_an_answer(make_vllm: Make, vllm: Process, sglang: Process, tmp_path: Path, kind: str) -> None:
    server = sglang if kind == "sglang" else vllm
    model = with_tokenizer(tmp_path / "model")
    server.tell(tokenizer=model, without=[ROUTES["tokens"]] if kind == "completions" else [])
    rollout = make_vllm(server, model=model, dialect=SGLang() if kind == "sglang" else VLLM())
    (whole,) = run(rollout.generate(PROMPT, endless(40, seed=5)))
    text = tokenizer().decode(list(whole.tokens))
    for stop in ((text[11:18],), ("not there", text[30:34])):
        before = server.drawn()
        (answer,) = run(rollout.generate(PROMPT, endless(40, seed=5, stop=stop, top_logprobs=2)))
        count = shortest(whole.tokens, stop)
        assert answer.tokens == whole.tokens[:count]
        assert (answer.finish_reason, len(answer.top), server.drawn() - before) == ("stop", count, count)


def test_stop_string_that_an_interruption_cuts_is_found(make_vllm: Make, sglang: Process, tmp_path: Path) -> None:
    """The server has the text of its own request only."""
    model = with_tokenizer(tmp_path / "model")
    sglang.tell(tokenizer=model)
    rollout = make_vllm(sglang, model=model, dialect=SGLang())
    (whole,) = run(rollout.generate(PROMPT, endless(30, seed=5)))
    cut = 10
    stop = (tokenizer().decode(list(whole.tokens[cut - 2 : cut + 2])),)
    assert shortest(whole.tokens, stop) == cut + 2
    entries = [[p, token, None] for p, token in zip(whole.logprobs[:cut], whole.tokens, strict=False)]
    label = sglang.told()["label"]
    sglang.can(
        ROUTES["sglang"],
        body=sglang_reply(label, output_token_logprobs=entries, finish_reason={"type": "abort", "message": "Aborted"}),
    )
    (answer,) = run(rollout.generate(PROMPT, endless(30, seed=5, stop=stop)))
    assert answer.tokens == whole.tokens[: cut + 2]
    assert answer.finish_reason == "stop"
    assert len(answer.versions) == len(answer.logprobs) == cut + 2


@pytest.mark.parametrize("options", [{}, {"model": None}], ids=["without a tokenizer", "without a model"])
def test_stop_strings_need_a_tokenizer(make_vllm: Make, vllm: Process, options: dict[str, Any]) -> None:
    rollout = make_vllm(vllm, **options)
    with pytest.raises(ValueError, match=r"Sampling.stop = \('x',\): text needs a tokenizer: give HTTPRollout\(model="):
        run(rollout.generate(PROMPT, endless(4, stop=("x",))))


@pytest.mark.parametrize("kind", ["tokens", "completions"])
def test_most_likely_tokens_are_there_where_another_one_was_sampled(make_vllm: Make, vllm: Process, kind: str) -> None:
    vllm.tell(without=[ROUTES["tokens"]] if kind == "completions" else [])
    (answer,) = run(make_vllm(vllm).generate(PROMPT, endless(20, seed=1, top_logprobs=2)))
    best = plain(replica(), PROMPT, answer.tokens).topk(2)
    assert [each.ids for each in answer.top] == [tuple(row) for row in best.indices.tolist()]
    torch.testing.assert_close(torch.tensor([each.logprobs for each in answer.top]), best.values, rtol=0, atol=1e-5)
    assert any(token not in each.ids for token, each in zip(answer.tokens, answer.top, strict=True))


def test_more_top_logprobs_than_the_server_has_are_refused_with_its_words(make_vllm: Make, vllm: Process) -> None:
    with pytest.raises(ValueError, match=r"/inference/v1/generate: status 400.*logprobs"):
        run(make_vllm(vllm).generate(PROMPT, endless(4, top_logprobs=21)))
