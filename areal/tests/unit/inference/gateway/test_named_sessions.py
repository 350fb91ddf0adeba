"""Sessions with a name, which programs send in a header."""

from __future__ import annotations

import httpx2
import pytest

from areal.inference.gateway import Gateway
from areal.inference.protocol import Sampling
from areal.tests.harness.limits import PROMPTLY
from areal.tests.unit.inference.gateway.programs import Model, run, tokenizer


def test_header_names_the_session() -> None:
    async def work() -> None:
        async with Gateway(tokenizer(), Sampling(64)) as gateway, httpx2.AsyncClient(timeout=PROMPTLY) as http:
            with gateway.session(Model([5, 6]), name="one") as one, gateway.session(Model([7]), name="two") as two:
                # verifiers sends the last parameter with each prompt that it extends.
                body = {"token_ids": [1, 2], "sampling_params": {"routed_experts_prompt_start": 1}}
                for name, status in (("one", 200), ("two", 200), ("three", 404)):
                    headers = {"X-Session-ID": name, "Authorization": "Bearer EMPTY"}
                    reply = await http.post(f"{gateway.root}/inference/v1/generate", json=body, headers=headers)
                    assert reply.status_code == status, reply.text
        sampled = [[list(each.segments[-1].tokens) for each in session.sequences()] for session in (one, two)]
        assert sampled == [[[5, 6]], [[7]]]

    run(work)


def test_name_of_an_open_session_is_refused() -> None:
    async def work() -> None:
        async with Gateway(tokenizer(), Sampling(64)) as gateway:
            with gateway.session(Model(), name="one"):
                with pytest.raises(ValueError, match="name = 'one'"), gateway.session(Model(), name="one"):
                    pass
                assert gateway.find("one").id == "one"

    run(work)


def test_gateway_that_does_not_serve_has_no_url() -> None:
    gateway = Gateway(tokenizer(), Sampling(64))
    with pytest.raises(RuntimeError, match="does not serve"):
        _ = gateway.root
