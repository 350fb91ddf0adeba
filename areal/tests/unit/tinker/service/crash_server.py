"""A server that a test kills: starts a service on backends in memory, and does what its arguments say.

Prints one line per acknowledged step, so that the test knows what the server must not lose.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from areal.tests.unit.tinker.service.fakes import (
    LOCAL,
    FakeSampling,
    FakeTraining,
    digest,
    done,
    new_model,
    sample,
    settings,
    step,
    train,
)
from areal.tinker.service.service import Service
from areal.tinker.service.verbs.weights import SaveForSampler, SaveWeights


def tell(*words: Any) -> None:
    print(*words, flush=True)


async def serve(root: Path, url: str | None) -> None:
    """Train a model without end: a step, a checkpoint, a snapshot, and requests that never end."""
    training, sampling = FakeTraining(), FakeSampling()
    server = Service(training, sampling, settings(root, database_url=url, lease_s=1.0))
    await server.start()
    service = server.for_caller(LOCAL)
    tell("session", session := await service.create_session([]))
    tell("model", model := await new_model(service, session))
    seq = 0
    while True:
        if seq == 9:
            # From here on, nothing is answered.
            name = await service.create_sampling_session(session, 99, base_model="base")
            sampling.gate.clear()
            tell("sampling", (await service.submit(sample(name, 1))).request_id, name)
            training.gate.clear()
            for late in (10, 11, 13):
                tell("training", (await service.submit(train(model, late))).request_id)
            await asyncio.sleep(60)
        await done(service, train(model, seq + 1))
        submitted = await service.submit(step(model, seq + 2, learning_rate=1.0))
        assert (await service.retrieve(submitted.request_id, 10)).state == "done"
        tell("done", submitted.request_id)
        saved = (SaveWeights if seq < 6 else SaveForSampler)(model, seq + 3, digest(seq), path=f"n{seq}")
        tell("saved", (await done(service, saved))["path"])
        seq += 3


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None))
