"""Rollouts that sleep: device memory is freed, answers do not change, and nothing is lost silently."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from areal import FinetuneSpec, OptimizerConfig, TrainEngine, TrainEngineConfig, create_engine
from areal.dispatch import SharedDevices, Use
from areal.inference.http import VLLM, Dialect, HTTPRollout, SGLang
from areal.tests.dist.dispatch.shared import FakeRollout
from areal.tests.grid.models import model_dir
from areal.tests.harness.engine_bytes import bytes_on_device
from areal.tests.harness.limits import promptly, wait_until
from areal.tests.harness.servers import rollout_http as http
from areal.tests.harness.tiny import global_batch, loss
from areal.tests.unit.inference.local.rollouts import PROMPT, Reading, endless, model, rollout, run, weights

ASLEEP = r"the rollout is asleep: call wake\(\) first"


def storage_bytes(replica: PreTrainedModel) -> int:
    tensors = [*replica.parameters(), *replica.buffers()]
    return sum({x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}.values())


def test_answers_after_sleep_are_those_without() -> None:
    # Shorter than a page: keys and values of earlier requests would change the rounding.
    prompt = PROMPT[:10]
    with rollout(seed=3) as engine:
        expected = [run(engine.generate(prompt, endless(12)))[0] for _ in range(3)]
    replica = model()
    before = {name: x.clone() for name, x in replica.state_dict().items()}
    with rollout(replica, seed=3) as engine:
        answers = run(engine.generate(prompt, endless(12)))
        for _ in range(2):
            engine.sleep()
            assert engine.asleep
            engine.sleep()
            assert storage_bytes(replica) == 0
            assert engine._manager.batch_processor is None, "the cache is dropped"
            engine.wake()
            assert not engine.asleep
            engine.wake()
            assert all(torch.equal(x, before[name]) for name, x in replica.state_dict().items())
            answers += run(engine.generate(prompt, endless(12)))
    assert answers == expected


def test_mapped_weights_can_sleep() -> None:
    """Weights that transformers maps from a file cannot be resized in place."""
    replica = AutoModelForCausalLM.from_pretrained(model_dir("qwen3"), dtype=torch.float32).eval()
    with rollout(replica) as engine:
        (before,) = run(engine.generate(PROMPT[:10], endless(5, seed=1)))
        engine.sleep()
        assert storage_bytes(replica) == 0
        engine.wake()
        assert run(engine.generate(PROMPT[:10], endless(5, seed=1))) == [before]


def test_requests_while_asleep_raise() -> None:
    with rollout() as engine:
        engine.sleep()
        with pytest.raises(RuntimeError, match=ASLEEP):
            run(engine.generate(PROMPT, endless(3)))
        engine.wake()
        assert len(run(engine.generate(PROMPT, endless(3)))[0].tokens) == 3


def test_update_while_asleep_is_refused_and_not_lost() -> None:
    with rollout(version=3) as engine:
        expected = run(engine.generate(PROMPT[:10], endless(6, seed=1)))
        engine.sleep()
        reading = Reading(weights(1))
        with pytest.raises(RuntimeError, match=ASLEEP):
            engine.update(reading, 4)
        assert reading.ended, "the iterator may be collective"
        engine.wake()
        assert engine.version == 3
        assert run(engine.generate(PROMPT[:10], endless(6, seed=1))) == expected
        engine.update(weights(1), 4)
        assert run(engine.generate(PROMPT[:10], endless(6, seed=1)))[0].versions == (4,) * 6


def test_sleep_with_running_answers_is_refused() -> None:
    with rollout() as engine:

        async def generate() -> int:
            answer = asyncio.ensure_future(engine.generate(PROMPT, endless(30)))
            await asyncio.sleep(0)
            with pytest.raises(RuntimeError, match=r"1 answers are running.*: wait for them before sleep\(\)"):
                engine.sleep()
            assert not engine.asleep
            return len((await asyncio.wait_for(answer, 60)).tokens)

        assert asyncio.run(generate()) == 30
        engine.sleep()


def test_close_while_asleep_gives_the_model_its_weights() -> None:
    replica = model()
    before = {name: x.clone() for name, x in replica.state_dict().items()}
    with rollout(replica) as engine:
        engine.sleep()
    assert all(torch.equal(x, before[name]) for name, x in replica.state_dict().items())
    for verb in (engine.wake, engine.sleep):
        with pytest.raises(RuntimeError, match="the rollout was closed"):
            verb()


# ---- servers


SLEEP = {"sglang": "/release_memory_occupation", "vllm": "/sleep"}
WAKE = {"sglang": "/resume_memory_occupation", "vllm": "/wake_up"}
KINDS = ["vllm", pytest.param("sglang")]
DIALECTS: dict[str, Dialect] = {"sglang": SGLang(weights_backup=True), "vllm": VLLM()}


@pytest.fixture(scope="module")
def process() -> Iterator[http.Process]:
    started = http.Process()
    yield started
    started.kill()


@pytest.fixture
def server(process: http.Process) -> http.Process:
    process.tell(reset=True, backup=True)
    return process


def client(server: http.Process, dialect: Dialect, folder: Path, **options: Any) -> HTTPRollout:
    return HTTPRollout(server.url, dialect, folder=folder, model=model_dir("qwen3"), version=2, **options)


@pytest.mark.parametrize("kind", DIALECTS)
def test_servers_sleep_and_wake_with_the_same_weights(kind: str, server: http.Process, tmp_path: Path) -> None:
    with client(server, DIALECTS[kind], tmp_path) as engine:
        expected = run(engine.generate(PROMPT, endless(4, seed=1)))
        for _ in range(2):
            engine.sleep()
            assert engine.asleep
            engine.sleep()
            with pytest.raises(RuntimeError, match=ASLEEP):
                run(engine.generate(PROMPT, endless(4)))
            engine.wake()
            assert not engine.asleep
            engine.wake()
            assert run(engine.generate(PROMPT, endless(4, seed=1))) == expected
        assert (server.calls(SLEEP[kind]), server.calls(WAKE[kind])) == (2, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_servers_on_shared_devices_wake_for_answers_and_weights(
    kind: str, server: http.Process, tmp_path: Path
) -> None:
    other = FakeRollout()
    with client(server, DIALECTS[kind], tmp_path) as engine:
        shared = SharedDevices({"gpu": 10})
        rollout = shared.add_rollout("rollout", engine, 6)
        assert not engine.asleep
        # No room for both: it sleeps at once.
        shared.add_rollout("other", other, 6)
        with shared.use("other", Use.GENERATE):
            assert engine.asleep
        assert server.calls(SLEEP[kind]) == 1
        rollout.update(http.weights(1), 3)
        assert not rollout.asleep
        (answer,) = run(rollout.generate(http.PROMPT, endless(4)))
        assert answer.versions == (3,) * 4
        rollout.sleep()
        # An answer wakes it, too, and so do weights in a folder.
        run(rollout.generate(http.PROMPT, endless(4)))
        rollout.sleep()
        rollout.load(tmp_path / "version-00000003", 4)
        assert rollout.version == 4
        assert server.calls(WAKE[kind]) == 3


NAMES = {
    "/pause": "pause",
    "/sleep": "sleep",
    "/wake_up": "wake",
    "/collective_rpc": "load",
    "/resume": "resume",
    "/v1/completions": "generate",
    "/pause_generation": "pause",
    "/release_memory_occupation": "sleep",
    "/resume_memory_occupation": "wake",
    "/update_weights_from_disk": "load",
    "/continue_generation": "resume",
    "/generate": "generate",
}


class Timeline:
    """What a server was asked and which state of an engine moved, in order."""

    def __init__(self, server: http.Process, engine: TrainEngine) -> None:
        self._server, self._engine, self._seen = server, engine, 0
        self._moves = {name: getattr(engine, name) for name in ("offload", "onload")}
        self._events: list[str] = []
        for name in self._moves:
            setattr(engine, name, partial(self._move, name))

    def note(self, event: str) -> None:
        order = self._server.told()["order"]
        self._events += [NAMES[route] for route in order[self._seen :] if route in NAMES]
        self._seen = len(order)
        self._events.append(event)

    def take(self) -> list[str]:
        """Return what happened since the last call."""
        self.note("")
        events, self._events = self._events, []
        return [event for event in events if event]

    def _move(self, name: str, **kinds: bool) -> None:
        # In another order than the server's requests it would not fit on the device.
        before = self._engine.memory()[0]
        self._moves[name](**kinds)
        after = self._engine.memory()[0]
        for kind in ("params", "grads", "optimizer"):
            if getattr(before, kind).on_device != getattr(after, kind).on_device:
                self.note(f"{name} {kind}")


@pytest.mark.parametrize("kind", KINDS)
def test_server_and_engine_on_one_device_take_turns(kind: str, server: http.Process, tmp_path: Path) -> None:
    """Nothing comes to the device before what it replaces has left."""
    settings = TrainEngineConfig(path=model_dir("qwen3"), dtype="float32", optimizer=OptimizerConfig(lr=1e-3))
    with create_engine(settings) as trained, client(server, DIALECTS[kind], tmp_path) as served:
        trained.initialize(FinetuneSpec(total_train_steps=4))
        trained.train_batch(global_batch(), loss)
        weights = bytes_on_device(trained)["params"]
        # Weights, gradients and two moments. Next to the server there is room for the engine's weights.
        shared = SharedDevices({"gpu": 4 * weights})
        shared.add("policy", trained)
        rollout = shared.add_rollout("rollout", served, 3 * weights)
        timeline = Timeline(server, trained)
        steps = []
        for version in (3, 4):
            run(rollout.generate(http.PROMPT, endless(2)))
            with shared.use("policy", Use.STEP):
                trained.train_batch(global_batch(), loss)
            with shared.use("rollout", Use.GENERATE), shared.use("policy", Use.SYNC):
                rollout.sync(trained, version)
            steps.append(timeline.take())
        (answer,) = run(rollout.generate(http.PROMPT, endless(2)))
    assert answer.versions == (4, 4)
    added = ["pause", "sleep", "offload optimizer", "wake", "resume"]
    training = ["generate", "pause", "sleep", "onload optimizer"]
    update = ["offload optimizer", "wake", "resume", "pause", "load", "resume"]
    # A server without labels is resumed when it is opened: its last owner may have paused it.
    opened = ["resume"] if kind == "vllm" else []
    assert steps == [opened + added + training + update, training + update]


@pytest.mark.parametrize("kind", KINDS)
def test_update_of_sleeping_servers_is_refused_and_not_lost(kind: str, server: http.Process, tmp_path: Path) -> None:
    with client(server, DIALECTS[kind], tmp_path) as engine:
        engine.sleep()
        reading = Reading(http.weights(1))
        with pytest.raises(RuntimeError, match=ASLEEP):
            engine.update(reading, 3)
        assert reading.ended
        assert not list(tmp_path.iterdir())
        with pytest.raises(RuntimeError, match=ASLEEP):
            engine.load(model_dir("qwen3"), 3)
        engine.wake()
        assert engine.version == 2
        engine.update(http.weights(1), 3)
        (answer,) = run(engine.generate(http.PROMPT, endless(4)))
        assert answer.versions == (3,) * 4
        http.assert_drawn_from(http.replica(1), answer)


def test_sglang_without_a_backup_needs_an_update(server: http.Process, tmp_path: Path) -> None:
    server.tell(backup=False)
    with client(server, SGLang(), tmp_path) as engine:
        engine.sleep()
        engine.wake()
        with pytest.raises(RuntimeError, match="has slept without a backup of its weights: send an update"):
            run(engine.generate(PROMPT, endless(4)))
        assert server.calls("/generate") == 0
        engine.update(http.weights(1), 3)
        (answer,) = run(engine.generate(http.PROMPT, endless(4)))
        http.assert_drawn_from(http.replica(1), answer)


@pytest.mark.parametrize("kind", KINDS)
def test_sleep_with_running_requests_is_refused(kind: str, server: http.Process, tmp_path: Path) -> None:
    server.tell(step_seconds=0.02)
    with client(server, DIALECTS[kind], tmp_path) as engine:
        answers = http.Background(engine.generate(PROMPT, endless(30)))
        wait_until(lambda: bool(server.told()["seen"]))
        with pytest.raises(RuntimeError, match=r"1 answers are running: wait for them before sleep\(\)"):
            engine.sleep()
        assert len(answers.result()[0].tokens) == 30
        assert server.calls(SLEEP[kind]) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_server_that_cannot_sleep_keeps_all_awake(kind: str, server: http.Process, tmp_path: Path) -> None:
    """Sleep mode is off on one server."""
    urls = [server.url, server.url.replace("127.0.0.1", "localhost")]
    with HTTPRollout(urls, DIALECTS[kind], folder=tmp_path) as engine:
        # Late, so that the other server sleeps by then.
        server.can(SLEEP[kind], status=500, body="sleep mode is not enabled", delay=0.5)
        with pytest.raises(
            RuntimeError, match=f"not every server can sleep: .*{SLEEP[kind]}: status 500: sleep mode is not"
        ):
            engine.sleep()
        assert not engine.asleep
        assert server.calls(WAKE[kind]) == 1
        assert len(run(*(engine.generate(PROMPT, endless(3)) for _ in range(4)))) == 4


@pytest.mark.parametrize("kind", KINDS)
def test_server_that_does_not_wake_is_excluded(kind: str, server: http.Process, tmp_path: Path) -> None:
    with client(server, DIALECTS[kind], tmp_path, update_seconds=0.5) as engine:
        engine.sleep()
        server.can(WAKE[kind], status=400, body="broken")
        woken = f"not every server has woken up: .*{WAKE[kind]}: status 400: broken"
        with promptly(), pytest.raises(RuntimeError, match=woken):
            engine.wake()
        with pytest.raises(RuntimeError, match="did not wake up"):
            run(engine.generate(PROMPT, endless(3)))
