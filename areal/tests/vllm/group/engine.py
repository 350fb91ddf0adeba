"""Trains an engine under torchrun, sends its weights to a vLLM server over a process group, and prints the errors of served log-probs.

``torchrun --nproc-per-node N -m areal.tests.vllm.group.engine URL BACKEND PACKED_BYTES CHUNK_BYTES``
"""

from __future__ import annotations

import json
import sys

from areal.api import OptimizerConfig
from areal.inference.http import VLLM
from areal.inference.http.group import GlooCarrier
from areal.tests.harness.servers.group_sending import GroupSending
from areal.tests.harness.tiny import global_batch, local_batch, loss, started, weights_of
from areal.tests.vllm.group.generating import served_error
from areal.tests.vllm.server import replica, served_model

UPDATES = 3


def main(url: str, backend: str, packed_bytes: int, chunk_bytes: int) -> None:
    everything = global_batch()
    with started(backend, path=served_model(), dtype="float32", optimizer=OptimizerConfig(lr=0.05)) as engine:
        transport = GroupSending(
            [url],
            VLLM(),
            GlooCarrier(),
            control=engine.control,  # type: ignore[attr-defined]
            packed_bytes=packed_bytes or None,
            chunk_bytes=chunk_bytes,
            timeout=60,
        )
        for version in range(1, UPDATES + 1):
            engine.train_batch(local_batch(engine, everything), loss)
            transport.send(engine, version)
            weights = weights_of(engine)
            if transport.servers:
                model = replica()
                before = served_error(url, model, version)
                model.load_state_dict(weights, strict=True)
                print(json.dumps({"version": version, "error": served_error(url, model, version), "before": before}))
        transport.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
