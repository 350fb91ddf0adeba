"""A client that only retries, and a server process that is killed again and again."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx2
import numpy as np

from areal.tests.tinker.api.bodies import PROTOBUF, datum, tensor
from areal.tests.tinker.sdk.server import KEY, ServerProcess
from areal.tinker.api import wire_pb2

VOCAB = 64
_OPTIONS = {"timeout": 60.0, "headers": {"X-API-Key": KEY}}


class RetryingClient:
    """Sends each request until it is answered. ``url`` may change in between."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._http = httpx2.Client(**_OPTIONS)

    def post(self, route: str, **body: Any) -> httpx2.Response:
        """Send a body as often as it takes."""
        while True:
            try:
                answer = self._http.post(f"{self.url}/api/v1/{route}", **body)
                if answer.status_code < 500 and answer.status_code != 429:
                    return answer
            except httpx2.TransportError:
                pass
            time.sleep(0.02)

    def result(self, submitted: httpx2.Response) -> dict[str, Any]:
        """Wait for a result."""
        request_id = submitted.json()["request_id"]
        while True:
            answer = self.post("retrieve_future", json={"request_id": request_id}).json()
            if answer.get("type") != "try_again":
                assert "error" not in answer, answer
                return answer

    def new_model(self) -> str:
        """Create a session and a model in it."""
        session = self.post("create_session", json={"tags": [], "sdk_version": "0.38.0"}).json()["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4, "seed": 3}}
        return self.result(self.post("create_model", json=body))["model_id"]

    def step(self, model: str, number: int) -> list[float]:
        """Run the pass and the step with a number, both on their way at once. Returns the log-probs."""
        body = _pass(model, 2 * number + 1)
        passed = self.post("forward_backward", content=body, headers=PROTOBUF)
        adam = {"learning_rate": 1e-2 / (1 + number % 7), "eps": 1e-8, "weight_decay": 0.01 * (number % 2)}
        stepped = self.post("optim_step", json={"model_id": model, "seq_id": 2 * number + 2, "adam_params": adam})
        outputs = self.result(passed)["loss_fn_outputs"]
        self.result(stepped)
        return [value for output in outputs for value in output["logprobs"]["data"]]


def _pass(model: str, seq: int) -> bytes:
    rng = np.random.default_rng(seq)
    data = []
    for length in (9, 5):
        ids = rng.integers(3, VOCAB, length + 1)
        weights = tensor(rng.normal(size=length))
        data.append(datum(ids[:-1].tolist(), target_tokens=tensor(ids[1:], np.int64), weights=weights))
    request = wire_pb2.ForwardBackwardRequest(model_id=model, seq_id=seq, loss_fn="cross_entropy", data=data)
    return request.SerializeToString()


def train(client: RetryingClient, count: int, at: Callable[[int], None] = lambda number: None) -> list[list[float]]:
    """Train a new model. ``at`` is called before each step. Returns the log-probs of each pass."""
    model, found = client.new_model(), []
    for number in range(count):
        at(number)
        found.append(client.step(model, number))
    return found


class KilledServer:
    """A server process that ends while chosen steps run, and starts again on the same files and port.

    Args:
        ends: signal by the number of the step.
        options: further options of ``areal serve``.
    """

    def __init__(
        self,
        folder: Path,
        model: str,
        ends: Mapping[int, signal.Signals] = MappingProxyType({}),
        options: tuple[str, ...] = (),
    ) -> None:
        self._create = lambda port: ServerProcess(folder, model, port=port, options=options)
        self.server = self._create(0)
        self.url, self._port, self._ends = self.server.url, self.server.port, ends
        self._random = random.Random(0)
        self._ending: threading.Timer | None = None
        self.ended = 0

    def before_step(self, number: int) -> None:
        """End the process if a step is chosen: some milliseconds after this call, while the step runs."""
        if number in self._ends:
            self.wait()
            delay = self._random.choice([0.0, 0.005, 0.02, 0.05])
            self._ending = threading.Timer(delay, self._end, [self._ends[number]])
            self._ending.start()

    def _end(self, number: signal.Signals) -> None:
        self.server.stop(number)
        self.ended += 1
        self.server = self._create(self._port)

    def wait(self) -> None:
        """Wait until a process that was ended has a successor."""
        if self._ending is not None:
            self._ending.join()

    def stop(self) -> None:
        """Stop the last process."""
        self.wait()
        self.server.stop()
