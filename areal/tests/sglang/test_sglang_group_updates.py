"""Weights over a process group into SGLang, over gloo."""

from __future__ import annotations

from areal.inference.http import HTTPRollout, SGLang
from areal.inference.http.group import TorchCarrier
from areal.tests.sglang import server
from areal.tests.sglang.server import SGLangProcess
from areal.tests.vllm.answers import TOLERANCE, Clients, endless, error, prompt, run
from areal.tests.vllm.server import replica, weights

pytestmark = server.marks


def test_weights_over_gloo_are_those_of_their_version(sglang: SGLangProcess) -> None:
    """Also of answers that are under way."""
    loads = sglang.asked("/update_weights_from_disk")
    carrier = TorchCarrier(backend="gloo", device="cpu")
    with HTTPRollout(sglang.url, SGLang(), carrier=carrier, model=sglang.model, deadline=120) as rollout:
        rollout.update(weights(1), 1)
        with Clients(rollout, 4, range(60, 200, 20)) as clients:
            clients.wait_for(2)
            rollout.update(weights(2), 2)
        answers = run(rollout.generate(prompt(1), endless(16)))
    assert not clients.faults
    assert answers[0].versions == (2,) * 16
    models = {1: replica(1), 2: replica(2)}
    assert error(models, clients.prompts, clients.answers) <= TOLERANCE
    assert error(models, [prompt(1)], answers) <= TOLERANCE
    assert sglang.asked("/update_weights_from_disk") == loads
