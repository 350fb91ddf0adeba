"""Bodies of replies, in the forms of OpenAI's interface and of vLLM's token route."""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from areal.chat import ParsedAnswer
from areal.chat.template import cut
from areal.inference.protocol import Completion

Decode = Callable[[Sequence[int]], str]
"""Returns the text of token ids."""

_FINISH = {"stop": "stop", "length": "length", "aborted": "abort"}


def chat_reply(model: str, prompt: Sequence[int], choices: Sequence[dict[str, Any]], sampled: int) -> dict[str, Any]:
    """Return the reply of ``/v1/chat/completions``."""
    return {
        **_head("chatcmpl", "chat.completion", model),
        "choices": list(choices),
        "usage": usage(len(prompt), sampled),
    }


def chat_choice(
    index: int, completion: Completion, answer: ParsedAnswer, *, logprobs: bool, decode: Decode, token_ids: bool
) -> dict[str, Any]:
    """Return an entry of ``choices``. Arguments of calls are JSON."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.content or None, "refusal": None}
    if answer.reasoning is not None:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
            }
            for call in answer.tool_calls
        ]
    else:
        message["content"] = answer.content
    calls = bool(answer.tool_calls) and completion.finish_reason == "stop"
    return {
        "index": index,
        "message": message,
        "finish_reason": "tool_calls" if calls else _FINISH[completion.finish_reason],
        "logprobs": {"content": _token_logprobs(completion, decode), "refusal": None} if logprobs else None,
        **(_tokens(completion) if token_ids else {}),
    }


def chat_chunks(reply: dict[str, Any], *, with_usage: bool) -> Iterator[dict[str, Any]]:
    """Yield a reply of ``/v1/chat/completions`` as the chunks of a stream."""
    head = {**reply, "object": "chat.completion.chunk"}
    spent = head.pop("usage")
    for choice in head.pop("choices"):
        message = dict(choice["message"])
        calls = [{"index": number, **call} for number, call in enumerate(message.pop("tool_calls", ()))]
        deltas: list[dict[str, Any]] = [{"role": message.pop("role"), "content": ""}]
        deltas += [{name: text} for name, text in message.items() if text]
        deltas += [{"tool_calls": [call]} for call in calls]
        rest = {name: value for name, value in choice.items() if name not in ("message", "finish_reason", "logprobs")}
        for number, delta in enumerate(deltas):
            # Log-probs come with the first delta.
            logprobs = choice["logprobs"] if number == 0 else None
            yield {
                **head,
                "choices": [{"index": choice["index"], "delta": delta, "logprobs": logprobs, "finish_reason": None}],
            }
        yield {**head, "choices": [{**rest, "delta": {}, "logprobs": None, "finish_reason": choice["finish_reason"]}]}
    if with_usage:
        yield {**head, "choices": [], "usage": spent}


def text_reply(
    model: str,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Completion],
    decode: Decode,
    stop: Sequence[str],
    *,
    logprobs: bool,
    token_ids: bool,
) -> dict[str, Any]:
    """Return the reply of ``/v1/completions``: the answers to the first prompt come first."""
    each = len(completions) // len(prompts)
    choices = []
    for index, completion in enumerate(completions):
        ended = completion.finish_reason == "stop" and not stop
        text = cut(decode(completion.tokens), stop)
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "finish_reason": _FINISH[completion.finish_reason],
            "stop_reason": completion.tokens[-1] if ended and completion.tokens else None,
            "logprobs": _text_logprobs(completion, decode) if logprobs else None,
        }
        if token_ids:
            choice |= {**_tokens(completion), "prompt_token_ids": list(prompts[index // each])}
        choices.append(choice)
    known = sum(map(len, prompts))
    sampled = sum(len(completion.tokens) for completion in completions)
    return {**_head("cmpl", "text_completion", model), "choices": choices, "usage": usage(known, sampled)}


def token_reply(completions: Sequence[Completion]) -> dict[str, Any]:
    """Return the reply of vLLM's ``/inference/v1/generate``, and the version of the weights of each token in ``weight_versions``."""
    return {
        "request_id": f"gen-{secrets.token_hex(8)}",
        "choices": [
            {
                "index": index,
                "finish_reason": _FINISH[completion.finish_reason],
                **_tokens(completion),
                "logprobs": {
                    "content": [
                        {"token": f"token_id:{token}", "logprob": logprob}
                        for token, logprob in zip(completion.tokens, completion.logprobs, strict=True)
                    ]
                },
            }
            for index, completion in enumerate(completions)
        ],
    }


def models_reply(models: Sequence[str], max_model_len: int | None) -> dict[str, Any]:
    """Return the reply of ``/v1/models``."""
    length = {} if max_model_len is None else {"max_model_len": max_model_len}
    entries = [{"id": model, "object": "model", "created": 0, "owned_by": "areal", **length} for model in models]
    return {"object": "list", "data": entries}


def usage(prompt: int, sampled: int) -> dict[str, int]:
    """Return numbers of tokens."""
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _head(prefix: str, kind: str, model: str) -> dict[str, Any]:
    return {"id": f"{prefix}-{secrets.token_hex(12)}", "object": kind, "created": int(time.time()), "model": model}


def _tokens(completion: Completion) -> dict[str, Any]:
    return {"token_ids": list(completion.tokens), "weight_versions": list(completion.versions)}


def _token_logprobs(completion: Completion, decode: Decode) -> list[dict[str, Any]]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = decode([token])
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    tops = completion.top or ((),) * len(completion.tokens)
    return [
        {**entry(token, logprob), "top_logprobs": [entry(*pair) for pair in _sampleable(top)]}
        for token, logprob, top in zip(completion.tokens, completion.logprobs, tops, strict=True)
    ]


def _sampleable(top: Sequence[Any]) -> list[tuple[int, float]]:
    """Return tokens and log-probs without the tokens that ``top_p`` and ``top_k`` exclude: their ``-inf`` is no JSON."""
    return [pair for pair in zip(*top, strict=True) if pair[1] > -math.inf]


def _text_logprobs(completion: Completion, decode: Decode) -> dict[str, Any]:
    texts = [decode([token]) for token in completion.tokens]
    starts = [sum(map(len, texts[:number])) for number in range(len(texts))]
    tops = [{decode([token]): logprob for token, logprob in _sampleable(top)} for top in completion.top]
    return {
        "tokens": texts,
        "token_logprobs": list(completion.logprobs),
        "top_logprobs": tops or None,
        "text_offset": starts,
    }
