"""Client of ``benchmarks.server``: runs where the tinker SDK is installed, and prints its times as JSON.

python server_client.py BASE_MODEL ROUNDS, with TINKER_BASE_URL and TINKER_API_KEY; with two addresses more, the steps of two servers in turns
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable

import httpx
import tinker

RANK = 8
ADAM = tinker.AdamParams(learning_rate=1e-4)


def datum(tokens: int) -> tinker.Datum:
    """Return a sample with a weight of 1 for each of its tokens."""
    ids = [(7 * i) % 500 for i in range(tokens + 1)]
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData(data=ids[1:], dtype="int64", shape=[tokens]),
            "weights": tinker.TensorData(data=[1.0] * tokens, dtype="float32", shape=[tokens]),
        },
    )


def milliseconds(works: list[Callable[[], object]], rounds: int) -> list[list[float]]:
    """Return for each round the times of all calls, which have their turns one after the other, after three rounds to warm up."""
    times = []
    for number in range(rounds + 3):
        row = []
        for work in works:
            start = time.perf_counter()
            work()
            row.append(1e3 * (time.perf_counter() - start))
        if number >= 3:
            times.append(row)
    return times


def requests_per_second(clients: list[tinker.TrainingClient], tokens: int, seconds: float) -> float:
    """Return the rate of clients each of which waits for its answer before the next request."""
    counts = [0] * len(clients)
    data, end = [datum(tokens)], time.perf_counter() + seconds

    def run(index: int) -> None:
        while time.perf_counter() < end:
            clients[index].forward_backward(data, "cross_entropy").result()
            counts[index] += 1

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(clients))]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.perf_counter() - start)


def wait(client: tinker.TrainingClient, count: int) -> None:
    """Let clients wait for a request that comes after a missing one, until the process is ended."""
    url, headers = os.environ["TINKER_BASE_URL"] + "/api/v1/", {"X-API-Key": os.environ["TINKER_API_KEY"]}
    late = {"model_id": client.model_id, "seq_id": 1_000_000, "adam_params": {"learning_rate": 1e-4}}
    future = httpx.post(url + "optim_step", json=late, headers=headers).raise_for_status().json()

    def poll() -> None:
        while True:
            httpx.post(url + "retrieve_future", json={"request_id": future["request_id"]}, headers=headers, timeout=60)

    threads = [threading.Thread(target=poll) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def step_of(client: tinker.TrainingClient) -> Callable[[], None]:
    """Return a function that runs one step. Both requests are sent before the first answer is read."""
    batch = [datum(64)] * 4

    def step() -> None:
        passed, stepped = client.forward_backward(batch, "cross_entropy"), client.optim_step(ADAM)
        passed.result()
        stepped.result()

    return step


def compare(base_model: str, rounds: int, addresses: list[str]) -> None:
    """Print the times of steps of several servers, which have their turns one after the other."""
    services = [tinker.ServiceClient(base_url=address) for address in addresses]
    steps = [step_of(each.create_lora_training_client(base_model, rank=RANK, seed=0).result()) for each in services]
    print(json.dumps(milliseconds(steps, rounds)), flush=True)


def main(base_model: str, rounds: int) -> None:
    service = tinker.ServiceClient()
    clients = [service.create_lora_training_client(base_model, rank=RANK, seed=index).result() for index in range(8)]
    sampler = service.create_sampling_client(base_model=base_model).result()
    prompt, greedy = tinker.ModelInput.from_ints(list(range(1, 17))), tinker.SamplingParams(max_tokens=16, stop=[])
    times: dict[str, object] = {
        "step": [row[0] for row in milliseconds([step_of(clients[0])], rounds)],
        "sample": [row[0] for row in milliseconds([lambda: sampler.sample(prompt, 1, greedy).result()], rounds)],
    }
    for tokens in (45, 900):
        # In turns, so that a change of the machine's speed meets both.
        rates: list[tuple[float, float]] = []
        for _ in range(3):
            one, eight = (requests_per_second(few, tokens, 4.0) for few in (clients[:1], clients))
            rates.append((one, eight))
        times[f"rates {tokens}"] = rates
    print(json.dumps(times), flush=True)
    wait(clients[0], 10)


if __name__ == "__main__":
    if len(sys.argv) > 3:
        compare(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
    else:
        main(sys.argv[1], int(sys.argv[2]))
