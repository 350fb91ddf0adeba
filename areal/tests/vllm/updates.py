"""Answers of a vLLM server across updates of its weights."""

from __future__ import annotations

from areal.inference.http import HTTPRollout
from areal.tests.vllm.answers import TOLERANCE, Clients, error
from areal.tests.vllm.server import replica, weights


def across_updates(fresh: HTTPRollout) -> Clients:
    """Check long answers of 24 clients during which the weights are updated."""
    with Clients(fresh, 24, range(300, 492, 8)) as clients:
        for version in range(1, 5):
            # Few answers: most requests have tokens of the version before.
            clients.wait_for(9)
            fresh.update(weights(version), version)
    assert not clients.faults
    assert all(answer.sampling and len(answer.tokens) == answer.sampling.max_new_tokens for answer in clients.answers)
    assert all(list(answer.versions) == sorted(answer.versions) for answer in clients.answers)
    models = {version: replica(version or None) for version in range(5)}
    assert error(models, clients.prompts, clients.answers) <= TOLERANCE
    # The judge itself: under another version, the errors are large.
    assert error({version: models[(version + 1) % 5] for version in models}, clients.prompts, clients.answers) > 1
    several = sum(len(set(answer.versions)) > 1 for answer in clients.answers)
    print(f"{several} of {len(clients.answers)} answers have several versions")
    # On a busy machine, all requests may end before the pause of one of the updates.
    assert several >= 4
    return clients
