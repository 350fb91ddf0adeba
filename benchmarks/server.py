"""Costs of the training server in addition to those of the engine: a step and a sample by the SDK over HTTP, and many adapters.

python -m benchmarks.server, with the extra tinker and `make sdk`
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from areal import FinetuneSpec, OptimizerConfig, TrainEngine, TrainEngineConfig, create_engine
from areal.api import Batch, LoRAConfig, StepSettings, TokenOutputs
from areal.inference import LocalRollout, Sampling
from benchmarks.model import Size, write_model

ROUNDS, RESTART_ROUNDS = 40, 400
SIZE = Size(hidden=64, layers=2, vocabulary=512)
CLIENT = Path(__file__).with_name("server_client.py")
SDK = Path(__file__).parents[1] / ".venv-tinker-0.38.0" / "bin" / "python"
IDLE_SECONDS = 10.0


def milliseconds(work: Callable[[], object]) -> list[float]:
    """Return the time of each of :data:`ROUNDS` calls, after three calls to warm up."""
    times = []
    for number in range(ROUNDS + 3):
        start = time.perf_counter()
        work()
        if number >= 3:
            times.append(1e3 * (time.perf_counter() - start))
    return times


def summed_nll(outputs: TokenOutputs, batch: Batch) -> Tensor:
    """Sum of the negative log-probs."""
    if outputs.logprobs is None:
        raise RuntimeError("log-probs were not computed")
    return -outputs.logprobs.sum()


def engine_step(engine: TrainEngine) -> list[float]:
    """Time the calls of a step on the engine."""
    ids = torch.arange(65) * 7 % 500
    batch = [{"input_ids": ids[:-1], "target_ids": ids[1:]}] * 4
    settings = StepSettings(lr=1e-4, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0, gradient_clipping=float("inf"))

    def step() -> None:
        engine.forward_backward(batch, summed_nll, lambda _: torch.ones(()), normalization="sum", returns=("logprobs",))
        engine.optimizer_step(settings)

    return milliseconds(step)


def generator_sample(path: str) -> list[float]:
    """Time an answer of the generator in this process."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa").eval()
    sampling = Sampling(max_new_tokens=16, stop_token_ids=())
    with LocalRollout(model, max_context=256) as rollout:
        prompt = list(range(1, 17))
        return milliseconds(lambda: asyncio.run(rollout.generate(prompt, sampling)))


@contextmanager
def server(model: str, root: str, *options: str) -> Iterator[tuple[str, psutil.Process]]:
    """Start a server process. Yields its address and the process."""
    command = [sys.executable, "-m", "areal.cli", "serve", "--model", model, "--root", root, "--port", "0"]
    command += [*options, "--backend-config", '{"dtype": "float32"}', "--sampler-config", '{"dtype": "float32"}']
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            lines = iter(process.stdout or ())
            address = next(line.split()[-1] for line in lines if "TINKER_BASE_URL" in line)
            yield address, psutil.Process(process.pid)
        finally:
            process.terminate()


def cost_of_restarts(model: str, root: str) -> float:
    """Return the time of steps on a server that can be restarted, by that on one that cannot."""
    with (
        server(model, f"{root}/with", "--sampler", "none") as (first, _),
        server(model, f"{root}/without", "--no-recovery", "--sampler", "none") as (second, _),
    ):
        command = [str(SDK), str(CLIENT), model, str(RESTART_ROUNDS), first, second]
        environment = {**os.environ, "TINKER_API_KEY": "tml-benchmark"}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    times: list[tuple[float, float]] = json.loads(done.stdout.splitlines()[-1])
    # Sums: some steps wait for a snapshot.
    return sum(row[0] for row in times) / sum(row[1] for row in times)


def idle_cpu(process: psutil.Process) -> float:
    """Return the CPU seconds of a server whose clients all wait."""
    time.sleep(1.0)
    before = process.cpu_times()
    time.sleep(IDLE_SECONDS)
    after = process.cpu_times()
    return after.user + after.system - before.user - before.system


def main() -> None:
    """Print what the server adds."""
    torch.set_num_threads(1)
    if not SDK.exists():
        raise SystemExit(f"{SDK} is missing: run `make sdk`")
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "model")
        write_model(Path(path), SIZE)
        lora = LoRAConfig(rank=8, alpha=32, layer_kinds=("attention", "mlp", "head"))
        config = TrainEngineConfig(
            path=path, backend="fsdp:d1", dtype="float32", lora=lora, optimizer=OptimizerConfig(lr=1e-4)
        )
        with create_engine(config) as engine:
            engine.initialize(FinetuneSpec(total_train_steps=1000))
            own = statistics.median(engine_step(engine))
        generator = statistics.median(generator_sample(path))
        with server(path, folder) as (address, process):
            environment = {**os.environ, "TINKER_BASE_URL": address, "TINKER_API_KEY": "tml-benchmark"}
            command = [str(SDK), str(CLIENT), path, str(ROUNDS)]
            with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as client:
                line = client.stdout.readline() if client.stdout else ""
                # The client goes on with ten requests that wait for a result.
                idle = idle_cpu(process)
                client.kill()
        restarts = cost_of_restarts(path, folder)
    if not line:
        raise SystemExit("the client failed")
    times = json.loads(line)
    step, sample = statistics.median(times["step"]), statistics.median(times["sample"])
    print(f"a step of 4 x 64 tokens: engine {own:.1f} ms, SDK over HTTP {step:.1f} ms: {step - own:+.1f} ms")
    print(
        f"a sample of 16 tokens: generator {generator:.1f} ms, SDK over HTTP {sample:.1f} ms: {sample - generator:+.1f} ms"
    )
    for tokens in (45, 900):
        ratio = statistics.median(eight / one for one, eight in times[f"rates {tokens}"])
        one, eight = times[f"rates {tokens}"][1]
        print(
            f"requests of {tokens} tokens: one client {one:.1f} per s, eight adapters {eight:.1f} per s: {ratio:.2f}x"
        )
    print(f"a step on a server that can be restarted: {restarts:.2f} of one with --no-recovery")
    print(f"CPU of the server in {IDLE_SECONDS:.0f} s with ten waiting clients: {idle:.2f} s")


if __name__ == "__main__":
    main()
