"""Server processes, background requests and expected log-probs for tests of generation over HTTP."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Coroutine, Iterator, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from areal.api.weights import NamedTensor
from areal.inference.protocol import Completion
from areal.tests.grid.models import FAMILIES, VOCAB, model_dir, tiny_model
from areal.tests.harness.pool import PRELOADED
from areal.tests.harness.servers.rollout_server import serve
from areal.weight_sync.apply import ModuleSource

PROMPT = [(7 * i + 3) % VOCAB for i in range(23)]


class Process:
    """A server process.

    Args:
        model: directory of its model.
        modern: with the routes of a current vLLM.
    """

    def __init__(self, model: str | None = None, *, modern: bool = False) -> None:
        self.model, self.modern = model or model_dir("qwen3"), modern
        self._start()

    def _start(self, port: int = 0) -> None:
        # Forked where that is possible, because the imports take seconds. A rank of a test's world cannot fork.
        if multiprocessing.current_process().daemon:
            command = [sys.executable, "-m", "areal.tests.harness.servers.rollout_server", self.model, str(port)]
            self.started: Any = subprocess.Popen(
                [*command, *(["modern"] if self.modern else [])], stdout=subprocess.PIPE, text=True
            )
            return
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._ports, ours = context.Pipe(duplex=False)
        self.started = context.Process(target=serve, args=(self.model, port, self.modern, ours), daemon=True)
        self.started.start()
        ours.close()

    def restart(self) -> None:
        """Kill the process, and start another one on the same port, with the weights of the start. Waits until it answers."""
        port = int(self.url.rpartition(":")[2])
        self.kill()
        del self.port
        self._start(port)
        assert self.url.endswith(f":{port}")

    @property
    def url(self) -> str:
        if not hasattr(self, "port"):
            forked = isinstance(self.started, BaseProcess)
            self.port = self._ports.recv() if forked else int(self.started.stdout.readline())
        return f"http://127.0.0.1:{self.port}"

    def tell(self, **what: Any) -> None:
        self.post("/test", **what)

    def post(self, route: str, /, **body: Any) -> None:
        data = json.dumps(body).encode()
        urllib.request.urlopen(urllib.request.Request(f"{self.url}{route}", data), timeout=30).read()

    def can(self, route: str, *, status: int = 200, body: Any = "", times: int = 1, delay: float = 0.0) -> None:
        """Set the response of the next ``times`` requests, sent after ``delay`` seconds."""
        text = body if isinstance(body, str) else json.dumps(body)
        self.tell(route=route, status=status, body=text, times=times, delay=delay)

    def lose(self, route: str, times: int = 1) -> None:
        """Close the connections of the next ``times`` requests without a reply. They have their effect."""
        self.tell(route=route, times=times, lost=True)

    def told(self) -> dict[str, Any]:
        return json.loads(urllib.request.urlopen(f"{self.url}/test", timeout=30).read())

    def drawn(self) -> int:
        """Return the number of tokens that the server has generated."""
        return self.told()["drawn"]

    def calls(self, route: str) -> int:
        return self.told()["calls"].get(route, 0)

    def ends(self, seconds: float) -> bool:
        """Wait for the process to end by itself. Returns False if it does not."""
        self.started.join(seconds)
        return not self.started.is_alive()

    def kill(self) -> None:
        self.started.kill()
        if isinstance(self.started, BaseProcess):
            self.started.join()
            self._ports.close()
        else:
            self.started.wait()
            self.started.stdout.close()


def weights(seed: int) -> Iterator[NamedTensor]:
    return ModuleSource(tiny_model(FAMILIES["qwen3"](), seed)).named_tensors()


def replica(seed: int | None = None) -> PreTrainedModel:
    """Return a model with the servers' initial weights, or with those of a seed."""
    if seed is None:
        return AutoModelForCausalLM.from_pretrained(model_dir("qwen3"), dtype=torch.float32).eval()
    return tiny_model(FAMILIES["qwen3"](), seed).eval()


def run(*work: Coroutine[Any, Any, Completion]) -> list[Completion]:
    async def together() -> list[Completion]:
        return await asyncio.wait_for(asyncio.gather(*work), 60)

    return asyncio.run(together())


class Background:
    """Requests that run in the background of a test."""

    def __init__(self, *work: Coroutine[Any, Any, Completion]) -> None:
        self.answers: list[Completion] = []
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, args=work)
        self.thread.start()

    def _run(self, *work: Coroutine[Any, Any, Completion]) -> None:
        try:
            self.answers = run(*work)
        except BaseException as error:
            self.error = error

    def result(self) -> list[Completion]:
        self.thread.join(60)
        if self.error is not None:
            raise self.error
        return self.answers


@torch.no_grad()
def plain(model: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int], temperature: float = 1.0) -> Tensor:
    """Compute log-probs ``[len(tokens), V]`` in one forward over prompt and answer."""
    logits = model(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return (logits / (temperature or 1.0)).log_softmax(-1)


def assert_drawn_from(model: PreTrainedModel, answer: Completion, temperature: float = 1.0, start: int = 0) -> None:
    wanted = plain(model, PROMPT, answer.tokens, temperature).gather(1, torch.tensor([[t] for t in answer.tokens]))
    torch.testing.assert_close(torch.tensor(answer.logprobs)[start:], wanted[start:, 0], rtol=0, atol=1e-5)


def sglang_reply(label: str = "default", **changes: Any) -> dict[str, Any]:
    entries = changes.get("output_token_logprobs", [[-1.0, 5, None], [-2.0, 6, None]])
    spans = [{"version": label, "start": 0, "end": len(entries or ())}]
    meta = {"finish_reason": {"type": "length"}, "output_token_logprobs": entries, "weight_versions": spans}
    return {"meta_info": meta | changes}


def vllm_reply(**changes: Any) -> dict[str, Any]:
    logprobs = {"token_logprobs": [-1.0, -2.0]}
    return {"choices": [{"finish_reason": "length", "token_ids": [5, 6], "logprobs": logprobs, **changes}]}


BAD_REPLIES: dict[str, list[tuple[Any, str]]] = {
    "sglang": [
        ("no json", "no JSON"),
        ({}, "'meta_info'"),
        (sglang_reply(finish_reason={"type": "other"}), r"'meta_info.finish_reason.type'"),
        (sglang_reply(output_token_logprobs=None), r"output_token_logprobs is missing"),
        (sglang_reply(output_token_logprobs=[["x", 5, None]]), r"'meta_info.output_token_logprobs.0.0'"),
        (sglang_reply(output_token_logprobs=[[float("nan"), 5, None]]), r"'meta_info.output_token_logprobs.0.0'"),
        (sglang_reply(output_token_logprobs=[[-1.0, 5.5, None]]), r"'meta_info.output_token_logprobs.0.1'"),
        (sglang_reply(completion_tokens=3), r"completion_tokens = 3"),
        (sglang_reply(output_token_logprobs=[[-1.0, 5, None]] * 4), r"4 tokens came"),
        (sglang_reply(weight_versions=[]), r"weight versions of 0"),
        (sglang_reply(weight_versions=[{"version": "1", "start": 1, "end": 2}]), r"no label for token 0"),
    ],
    "vllm": [
        ("no json", "no JSON"),
        ({"choices": []}, "'choices'"),
        (vllm_reply(finish_reason=None), r"'choices.0.finish_reason'"),
        (vllm_reply(token_ids=None), r"'choices.0.token_ids'"),
        (vllm_reply(logprobs=None), r"logprobs is missing"),
        (vllm_reply(logprobs={"token_logprobs": [-1.0]}), r"2 tokens came with 1 log-probs"),
        (vllm_reply(logprobs={"token_logprobs": [None, -1.0]}), r"'choices.0.logprobs.token_logprobs.0'"),
        (vllm_reply(token_ids=[5, -1]), r"'choices.0.token_ids.1'"),
        (vllm_reply(token_ids=[1] * 4, logprobs={"token_logprobs": [-1.0] * 4}), r"4 tokens came"),
    ],
}
"""Refused inputs, with words of their error."""


def assert_true_versions(answer: Completion, prompt: Sequence[int] = PROMPT) -> None:
    """Check each token against the weights of its version: those of the seed ``version``, or the first ones for 0."""
    for version in sorted(set(answer.versions)):
        logprobs = plain(replica(version or None), prompt, answer.tokens).gather(
            1, torch.tensor([[t] for t in answer.tokens])
        )[:, 0]
        places = [i for i, each in enumerate(answer.versions) if each == version]
        torch.testing.assert_close(torch.tensor(answer.logprobs)[places], logprobs[places], rtol=0, atol=1e-5)
