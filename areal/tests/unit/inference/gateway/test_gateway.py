"""Sessions, streams and other routes of the gateway, and what it refuses."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx2
import pytest

from areal.inference.gateway import Gateway, http_routes
from areal.inference.gateway.text_request import TextRequest
from areal.inference.protocol import Sampling
from areal.tests.harness.limits import PROMPTLY
from areal.tests.unit.inference.gateway.programs import (
    TOOLS,
    USER,
    Model,
    ask,
    decoded,
    run,
    served,
    tokenizer,
    written,
)

REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({"model": "gpt-9"}, 404, "model_not_found"),
    ({"temperature": 0}, 400, "unsupported_value"),
    ({"presence_penalty": 0.5}, 400, "unsupported_value"),
    ({"logit_bias": {"5": 1}}, 400, "unsupported_value"),
    ({"min_tokens": 2}, 400, "unsupported_value"),
    ({"add_special_tokens": True}, 400, "unsupported_value"),
    ({"response_format": {"type": "json_object"}}, 400, "unsupported_value"),
    ({"tools": TOOLS, "tool_choice": "required"}, 400, "unsupported_value"),
    ({"parallel_tool_calls": False}, 400, "unsupported_value"),
    ({"some_new_field": 1}, 400, "unsupported_value"),
    ({"messages": []}, 400, "invalid_request"),
    ({"temperature": "hot"}, 400, "invalid_request"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, 400, "unsupported_value"),
    ({"messages": [USER, {"role": "assistant", "content": "4"}]}, 400, "unsupported_value"),
    (
        {
            "messages": [
                USER,
                {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{"}}]},
                USER,
            ]
        },
        400,
        "invalid_call",
    ),
]


@pytest.mark.parametrize(("fields", "status", "code"), REFUSED, ids=range(len(REFUSED)))
def test_request_that_cannot_be_honoured_is_refused_by_name(fields: dict[str, Any], status: int, code: str) -> None:
    async def work() -> None:
        async with served(Model(written("4"))) as (gateway, session, http):
            reply = await http.post("/chat/completions", json={"model": "policy", "messages": [USER], **fields})
            assert reply.status_code == status, reply.text
            error = reply.json()["error"]
            assert error["code"] == code
            named = next(name for name in fields if name != "tools")
            assert named in (error["param"] or "")
            assert named in error["message"]
            assert gateway.counts == session.counts == {code: 1}
            await ask(http, USER)
        assert len(session.sequences()) == 1

    run(work)


def test_fields_without_an_effect_are_taken() -> None:
    async def work() -> None:
        async with served(Model(written("4")), models=None) as (_, _, http):
            await ask(
                http, USER, model="any", user="me", store=False, metadata={}, presence_penalty=0, n=1, stream=False
            )

    run(work)


def test_stream_has_the_reply_in_chunks() -> None:
    async def work() -> None:
        async with served(Model(written("4"))) as (_, session, http):
            body = {"messages": [USER], "stream": True, "stream_options": {"include_usage": True}}
            reply = await http.post("/chat/completions", json=body)
        lines = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
        assert lines.pop() == "[DONE]"
        chunks = [json.loads(line) for line in lines]
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
        assert deltas == [{"role": "assistant", "content": ""}, {"content": "4"}, {}]
        assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
        assert chunks[-1]["usage"]["completion_tokens"] == len(written("4"))
        assert len(session.sequences()) == 1

    run(work)


def test_texts_and_tokens_are_continued() -> None:
    async def work() -> None:
        model = Model(written("4")[:-1])
        async with served(model) as (_, session, http):
            reply = (await http.post("/completions", json={"prompt": ["2+2=", "1+3="], "logprobs": 0})).json()
            assert [each["text"] for each in reply["choices"]] == ["4", "4"]
            assert reply["choices"][0]["logprobs"]["tokens"] == ["4"]
            assert [decoded(prompt) for prompt in model.prompts] == ["2+2=", "1+3="]
            tokens = [*model.prompts[0], *model.answers[0], 5]
            await http.post("/completions", json={"prompt": tokens})
        assert model.prompts[2] == tokens
        # The third request goes on where the first ended.
        assert [len(each.segments) for each in session.sequences()] == [2, 4]

    run(work)


def test_special_tokens_before_a_text_are_those_of_the_request() -> None:
    def tokenize(text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [0, 5] if add_special_tokens else [5]}

    for wanted, expected in ((None, [0, 5]), (True, [0, 5]), (False, [5])):
        assert TextRequest(prompt="a", add_special_tokens=wanted).prompts(tokenize) == [expected]


def test_token_route_answers_with_ids_log_probs_and_versions() -> None:
    async def work() -> None:
        model = Model([5, 6])
        async with served(model) as (_, session, http):
            url = session.base_url.removesuffix("/v1") + "/inference/v1/generate"
            body = {"model": "policy", "token_ids": [1, 2], "sampling_params": {"max_tokens": 9, "logprobs": 1}}
            reply = (await http.post(url, json=body)).json()
        (choice,) = reply["choices"]
        assert choice["token_ids"] == [5, 6]
        assert choice["weight_versions"] == [3, 3]
        assert choice["logprobs"]["content"] == [
            {"token": "token_id:5", "logprob": -0.5},
            {"token": "token_id:6", "logprob": -0.5},
        ]
        assert model.samplings[0].max_new_tokens == 9
        assert [list(each.tokens) for each in session.sequences()[0].segments] == [[1, 2], [5, 6]]

    run(work)


@pytest.mark.parametrize("by", ["header", "key"])
def test_session_is_named_by_a_header_or_a_key(by: str) -> None:
    async def work() -> None:
        async with served(Model(written("4"))) as (_, session, _):
            url = session.base_url.replace(f"/sessions/{session.id}", "")
            headers = {"X-Session-ID": session.id} if by == "header" else {"Authorization": f"Bearer {session.id}"}
            async with httpx2.AsyncClient(base_url=url, headers=headers) as http:
                await ask(http, USER)
                assert (await http.get("/models")).json()["data"][0]["id"] == "policy"
        assert len(session.sequences()) == 1

    run(work)


def test_sessions_do_not_see_each_other() -> None:
    async def work() -> None:
        async with served(Model(written("4"))) as (gateway, session, http):
            with gateway.session(Model(written("5"))) as other:
                async with httpx2.AsyncClient(base_url=other.base_url) as theirs:
                    replies = await asyncio.gather(ask(http, USER), ask(theirs, USER))
        assert [reply["choices"][0]["message"]["content"] for reply in replies] == ["4", "5"]
        assert len(session.sequences()) == len(other.sequences()) == 1

    run(work)


def test_ended_and_unknown_sessions_are_refused() -> None:
    async def work() -> None:
        async with served(Model(written("4"))) as (gateway, _, _):
            with gateway.session(Model(written("5")), max_requests=1) as other:
                async with httpx2.AsyncClient(base_url=other.base_url) as http:
                    await ask(http, USER)
                    used_up = await http.post("/chat/completions", json={"messages": [USER]})
            async with httpx2.AsyncClient(base_url=other.base_url) as http:
                ended = await http.post("/chat/completions", json={"messages": [USER]})
            async with httpx2.AsyncClient(base_url=other.base_url.replace(other.id, "nobody")) as http:
                unknown = await http.post("/chat/completions", json={"messages": [USER]})
        replies = [used_up, ended, unknown]
        assert [reply.json()["error"]["code"] for reply in replies] == [
            "too_many_requests",
            "session_ended",
            "session_unknown",
        ]
        assert [reply.status_code for reply in replies] == [410, 410, 404]

    run(work)


def test_end_of_a_session_cancels_its_request() -> None:
    async def work() -> None:
        model = Model()
        async with served(Model(written("4"))) as (gateway, _, _):
            with gateway.session(model) as session:
                async with httpx2.AsyncClient(base_url=session.base_url) as http:
                    asked = asyncio.ensure_future(http.post("/chat/completions", json={"messages": [USER]}))
                    while not model.prompts:
                        await asyncio.sleep(0.01)
                    session.end()
                    for _ in range(100):
                        await asyncio.sleep(0.01 * (not model.cancelled))
                    assert model.cancelled == 1
                    reply = await asked
        assert (reply.status_code, reply.json()["error"]["code"]) == (410, "session_ended")

    run(work)


@pytest.mark.parametrize("stream", [False, True])
def test_program_that_leaves_cancels_its_request(stream: bool) -> None:
    async def work() -> None:
        model = Model()
        async with served(model) as (_, session, http):
            asked = asyncio.ensure_future(http.post("/chat/completions", json={"messages": [USER], "stream": stream}))
            while not model.prompts:
                await asyncio.sleep(0.01)
            asked.cancel()
            while not model.cancelled:
                await asyncio.sleep(0.01)
            assert not session.sequences()
            assert not session.ended

    run(work)


def test_session_that_nobody_ends_is_ended_and_counted() -> None:
    async def work() -> None:
        async with served(Model(written("4")), idle_seconds=0.05) as (gateway, session, http):
            while not session.ended:
                await asyncio.sleep(0.01)
            reply = await http.post("/chat/completions", json={"messages": [USER]})
            assert "no request came for 0.05 s" in reply.json()["error"]["message"]
            assert gateway.counts["timed_out"] == 1

    run(work)


def test_session_with_a_request_under_way_is_not_idle() -> None:
    async def work() -> None:
        model = Model()
        async with served(model, idle_seconds=PROMPTLY) as (gateway, session, http):
            asked = asyncio.ensure_future(http.post("/chat/completions", json={"messages": [USER]}))
            while not model.prompts:
                await asyncio.sleep(0.01)
            # As the timer does.
            gateway._end_if_idle(session)
            assert not session.ended
            asked.cancel()
            while session.busy:
                await asyncio.sleep(0.01)
            gateway._end_if_idle(session)
            assert session.ended

    run(work)


class Failing(Model):
    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Any:
        raise self.error

    error: Exception


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (ValueError("no such token"), 400, "invalid_prompt"),
        (ValueError("beyond max_context = 8"), 400, "context_length_exceeded"),
        (RuntimeError("closed"), 503, "rollout_failed"),
    ],
)
def test_errors_of_the_rollout_reach_the_program(error: Exception, status: int, code: str, stream: bool) -> None:
    async def work() -> None:
        model = Failing()
        model.error = error
        async with served(model) as (gateway, session, http):
            reply = await http.post("/chat/completions", json={"messages": [USER], "stream": stream})
            assert reply.status_code == status, reply.text
            assert reply.json()["error"]["code"] == code
            assert str(error) in reply.json()["error"]["message"]
            assert session.counts == gateway.counts == {code: 1}

    run(work)


def test_stream_waits_and_tells_of_a_late_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_routes, "_WAITING_SECONDS", 0.01)
    waited = asyncio.Event()

    class Late(Model):
        async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Any:
            await waited.wait()
            raise RuntimeError("closed")

    async def work() -> None:
        async with served(Late()) as (_, session, http):
            lines: list[str] = []
            async with http.stream("POST", "/chat/completions", json={"messages": [USER], "stream": True}) as reply:
                async for line in reply.aiter_lines():
                    lines += [line] if line else []
                    waited.set()
        assert reply.status_code == 200
        assert lines[0] == ": waiting"
        assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == "rollout_failed"
        assert session.counts == {"rollout_failed": 1}

    run(work)


@pytest.mark.parametrize("field", ["features", "stream"])
def test_token_route_refuses_what_it_cannot_honour(field: str) -> None:
    async def work() -> None:
        async with served(Model([5])) as (_, session, http):
            url = session.base_url.removesuffix("/v1") + "/inference/v1/generate"
            reply = await http.post(url, json={"token_ids": [1, 2], field: True})
            assert reply.status_code == 400, reply.text
            assert field in reply.json()["error"]["message"]

    run(work)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"sampling": Sampling(4, temperature=0)}, "sampling.temperature = 0"),
        ({"rewrites": "drop"}, "rewrites = 'drop'"),
        ({"models": "policy"}, "models = 'policy'"),
        ({"idle_seconds": 0}, "idle_seconds = 0"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Gateway(tokenizer(), options.pop("sampling", Sampling(4)), **options)


def test_session_needs_a_gateway_that_serves() -> None:
    gateway = Gateway(tokenizer(), Sampling(4))
    with pytest.raises(RuntimeError, match="async with gateway"), gateway.session(Model()):
        pass


def test_requests_at_once_count_towards_their_limit() -> None:
    async def main() -> None:
        async with served(Model()) as (gateway, _, _):
            model = Model(written("5"))
            model.generate = slowly(model.generate)  # type: ignore[method-assign]
            with gateway.session(model, max_requests=2) as session:
                async with httpx2.AsyncClient(base_url=session.base_url, timeout=PROMPTLY) as http:
                    body = {"model": "policy", "messages": [USER]}
                    replies = await asyncio.gather(*(http.post("/chat/completions", json=body) for _ in range(4)))
            assert sorted(reply.status_code for reply in replies) == [200, 200, 410, 410]
            assert len(model.prompts) == 2

    run(main)


def slowly(generate: Any) -> Any:
    async def later(prompt_ids: list[int], sampling: Sampling) -> Any:
        completion = await generate(prompt_ids, sampling)
        await asyncio.sleep(0.3)
        return completion

    return later


def test_session_that_timed_out_is_counted_once() -> None:
    async def main() -> None:
        async with served(Model(written("5")), idle_seconds=0.05) as (gateway, session, http):
            while not session.ended:
                await asyncio.sleep(0.02)
            for _ in range(2):
                reply = await http.post("/chat/completions", json={"model": "policy", "messages": [USER]})
                assert reply.status_code == 410
                await asyncio.sleep(0.2)
            assert gateway.counts["timed_out"] == 1

    run(main)
