"""Trains an engine under torchrun, sends its weights to a vLLM server, and prints the errors of served log-probs.

``torchrun --nproc-per-node N -m areal.tests.vllm.group.engine URL BACKEND PACKED_BYTES CHUNK_BYTES``

``PACKED_BYTES`` are those of a process group; ``files`` sends by handles of memory, and ``shards`` what each rank has.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from areal.api import OptimizerConfig, ParallelDims
from areal.api.control import Control
from areal.inference.http import VLLM
from areal.inference.http.group import GlooCarrier
from areal.tests.harness.servers.group.memory import FileCarrier
from areal.tests.harness.servers.group.resharding import GlooReshardCarrier
from areal.tests.harness.servers.group.sending import GroupSending
from areal.tests.harness.tiny import global_batch, local_batch, loss, started, weights_of
from areal.tests.vllm.group.generating import served_error
from areal.tests.vllm.server import replica, served_model

UPDATES = 3
TRAINED_TOLERANCE = 3e-5
"""After steps of 0.05, logits are large: rounding depends on the processor."""


def sending(url: str, control: Control, packed_bytes: str, chunk_bytes: int) -> GroupSending:
    """Return the transport to a server."""
    if packed_bytes == "files":
        return GroupSending([url], VLLM(), FileCarrier(f"gpu-{control.rank}", chunk_bytes), control=control, timeout=60)
    if packed_bytes == "shards":
        return GroupSending([url], VLLM(), GlooReshardCarrier(), control=control, timeout=60)
    packed = int(packed_bytes) or None
    options: dict[str, Any] = {"packed_bytes": packed, "chunk_bytes": chunk_bytes, "timeout": 60}
    return GroupSending([url], VLLM(), GlooCarrier(), control=control, **options)


def main(url: str, backend: str, packed_bytes: str, chunk_bytes: int) -> None:
    everything = global_batch()
    with started(backend, path=served_model(), dtype="float32", optimizer=OptimizerConfig(lr=0.05)) as engine:
        transport = sending(url, engine.control, packed_bytes, chunk_bytes)  # type: ignore[attr-defined]
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


def assert_served_after_each_step(url: str, backend: str, packed_bytes: str, chunk_bytes: int) -> None:
    """Run :func:`main` on one or two ranks, and compare the log-probs of the server with those of the engine's weights."""
    ranks = ParallelDims.parse(backend).world_size
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", "areal.tests.vllm.group.engine", url, backend, packed_bytes, str(chunk_bytes)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [each["version"] for each in found] == [*range(1, UPDATES + 1)]
    assert max(each["error"] for each in found) < TRAINED_TOLERANCE, found
    assert min(each["before"] for each in found) > 100 * TRAINED_TOLERANCE


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
