"""Experts of tokens from servers: read from replies, put together over interruptions, and aligned with samples."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from areal.chat import Chat
from areal.inference.http.answer import Answer
from areal.inference.http.servers.dialect import ReplyPart, ServedModel
from areal.inference.http.servers.sglang import SGLang, SGLangRoutes
from areal.inference.http.servers.sglang_schemas import SGLangGenerated
from areal.inference.http.servers.vllm import VLLMRoutes, VLLMTokenRoutes
from areal.inference.http.servers.vllm_schemas import VLLMCompleted, VLLMGenerated
from areal.inference.protocol import Completion, Sampling
from areal.tests.unit.chat import templates
from areal.tests.unit.chat.tokenizers import chat_tokenizer
from areal.trainer.rollout.sequence import Sequence
from areal.utils.data.sequences import Segment

PROMPT, TOKENS = [5, 6, 7], (8, 9)


def experts(tokens: int, seed: int = 0) -> Tensor:
    """Return two experts of each token, in three layers."""
    drawn = torch.rand(tokens, 3, 8, generator=torch.Generator().manual_seed(seed))
    return drawn.argsort(-1)[..., :2].int()


def npy(x: Tensor, dtype: Any = np.uint8) -> str:
    file = io.BytesIO()
    np.save(file, x.numpy().astype(dtype))
    return base64.b64encode(file.getvalue()).decode()


def of_vllm(text: str | None, kind: type[VLLMRoutes] = VLLMTokenRoutes) -> ReplyPart:
    routes = kind(None, None, ServedModel(), labels=True, routed_experts=True)
    choice: dict[str, Any] = {"finish_reason": "length", "token_ids": list(TOKENS), "routed_experts": text}
    if kind is VLLMRoutes:
        choice["logprobs"] = {"token_logprobs": [-1.0, -2.0]}
        return routes.read_reply(VLLMCompleted.model_validate({"choices": [choice]}), Sampling())
    choice["logprobs"] = {"content": [{"token_id": token, "logprob": -1.0} for token in TOKENS]}
    choice["weight_versions"] = [{"start": 0, "end": 2, "version": "1"}]
    return routes.read_reply(VLLMGenerated.model_validate({"choices": [choice]}), Sampling())


def of_sglang(text: str | None) -> ReplyPart:
    routes = SGLangRoutes(None, ServedModel(), weights_backup=False, mask_tokens=8, routed_experts=2)
    call = routes.generate("a", PROMPT, 0, Sampling(), 1)
    assert call.body.return_routed_experts  # type: ignore[attr-defined]
    meta = {
        "finish_reason": {"type": "length", "length": 2},
        "prompt_tokens": len(PROMPT),
        "completion_tokens": 2,
        "output_token_logprobs": [(-1.0, token, None) for token in TOKENS],
        "weight_versions": [{"start": 0, "end": 2, "version": "1"}],
        "routed_experts": text,
    }
    return routes.read_reply(SGLangGenerated.model_validate({"meta_info": meta}), Sampling())


@pytest.mark.parametrize("kind", [VLLMRoutes, VLLMTokenRoutes])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32])
def test_replies_of_vllm_have_the_experts_of_each_token(kind: type[VLLMRoutes], dtype: Any) -> None:
    part = of_vllm(npy(experts(4), dtype), kind)
    assert part.routed_experts is not None
    assert torch.equal(part.routed_experts, experts(4))


def test_replies_of_sglang_have_the_experts_of_each_token() -> None:
    part = of_sglang(base64.b64encode(experts(4).numpy().tobytes()).decode())
    assert part.routed_experts is not None
    assert torch.equal(part.routed_experts, experts(4))


def test_replies_without_experts_are_named() -> None:
    for read in (of_vllm, of_sglang):
        with pytest.raises(ValueError, match=r"routed_experts is missing: .*--enable-return-routed-experts"):
            read(None)
        with pytest.raises(ValueError, match="routed_experts is no base64"):
            read("?")
    with pytest.raises(ValueError, match=r"is float64 \[4, 3, 2\]: expected integers"):
        of_vllm(npy(experts(4), np.float64))
    with pytest.raises(ValueError, match=r"has 18 numbers: expected a multiple of 4 tokens x 2 experts"):
        of_sglang(base64.b64encode(experts(3).numpy().tobytes()).decode())
    with pytest.raises(ValueError, match=r"SGLang.routed_experts = 0"):
        SGLang(routed_experts=0)


def part(rows: Tensor, *tokens: int, finish: Any = "aborted") -> ReplyPart:
    return ReplyPart(tokens, (-1.0,) * len(tokens), finish, routed_experts=rows)


def test_interrupted_answers_keep_the_experts_with_which_each_token_was_drawn() -> None:
    answer = Answer(PROMPT, Sampling(max_new_tokens=3))
    first, second = experts(4, seed=1), experts(5, seed=2)
    for reply in (part(first, 8, 9), part(second, 10, finish="length")):
        answer.check(reply)
        answer.add(reply, [0] * len(reply.tokens))
    made = answer.completion().routed_experts
    assert made is not None
    assert torch.equal(made, torch.cat([first, second[4:]]))
    with pytest.raises(ValueError, match="experts of 4 tokens came, and 5 were computed"):
        Answer(PROMPT, Sampling()).check(part(first, 8, 9, 10))


def completion(tokens: tuple[int, ...], rows: Tensor | None) -> Completion:
    n = len(tokens)
    return Completion(tokens, (-1.0,) * n, (0,) * n, "stop", routed_experts=rows)


def test_samples_have_the_experts_at_their_tokens() -> None:
    rows = experts(4)
    sample = Sequence.single(PROMPT, completion(TOKENS, rows), 1.0).sample()
    assert torch.equal(sample["routed_experts"][:4], rows)
    # Of the last token, none were computed.
    assert (sample["routed_experts"][4] == -1).all()
    assert "routed_experts" not in Sequence.single(PROMPT, completion(TOKENS, None), 1.0).sample()
    with pytest.raises(ValueError, match="experts of 3 tokens for a sequence of 5"):
        completion(TOKENS, experts(3)).after([Segment(PROMPT, trainable=False)])


def test_turns_keep_the_experts_of_their_answers() -> None:
    """Later prompts compute earlier answers anew, which does not count."""
    chat = Chat(chat_tokenizer(templates.CHATML))
    talk = chat.start([{"role": "user", "content": "one"}])
    size = len(talk.tokens)
    first = experts(size + 3, seed=1)
    talk.answer(completion((*chat.template.ids("two"), *chat.stop_token_ids[:1]), first))
    talk.add({"role": "user", "content": "three"})
    before = len(talk.tokens)
    second = experts(before + 4, seed=2)
    talk.answer(completion((*chat.template.ids("four"), *chat.stop_token_ids[:1]), second))
    sample = Sequence(talk.segments, 1.0).sample()["routed_experts"]
    assert torch.equal(sample[: size + 3], first)
    assert torch.equal(sample[size + 3 : -1], second[size + 3 :])
    assert (sample[-1] == -1).all()
