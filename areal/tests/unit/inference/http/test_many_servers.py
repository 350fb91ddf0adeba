"""Several servers of one owner: updates without resending, routing, and servers that die and return."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from areal.api.weights import NamedTensor
from areal.inference.http import HTTPRollout, fleet
from areal.inference.protocol import Completion
from areal.tests.grid.models import VOCAB
from areal.tests.harness.limits import wait_until
from areal.tests.harness.servers.rollout_http import (
    PROMPT,
    Background,
    Process,
    assert_drawn_from,
    assert_true_versions,
    replica,
    run,
    weights,
)
from areal.tests.unit.inference.http.conftest import Make
from areal.tests.unit.inference.local.rollouts import endless

TOKENS, COMPLETIONS, LOAD, PAUSE, RESUME = (
    "/inference/v1/generate",
    "/v1/completions",
    "/collective_rpc",
    "/pause",
    "/resume",
)


class Load(threading.Thread):
    """Clients that ask for short answers, one after the other, to changing prompts."""

    def __init__(self, rollout: HTTPRollout, clients: int = 6, tokens: int = 4) -> None:
        super().__init__()
        self.answers: list[tuple[list[int], Completion]] = []
        self.errors: list[BaseException] = []
        self.asked = 0
        self._rollout, self._clients, self._tokens = rollout, clients, tokens
        self._ends = threading.Event()
        self.start()

    def run(self) -> None:
        asyncio.run(self._all())

    async def _all(self) -> None:
        await asyncio.gather(*(self._client() for _ in range(self._clients)))

    async def _client(self) -> None:
        while not self._ends.is_set():
            self.asked += 1
            prompt = [self.asked % VOCAB, *PROMPT]
            try:
                answer = await self._rollout.generate(prompt, endless(self._tokens, seed=self.asked))
            except Exception as error:
                self.errors.append(error)
                return  # a test that fails closes the rollout, and every further request would fail
            self.answers.append((prompt, answer))

    def end(self) -> set[int]:
        """Return the versions of all answers. None may be missing, and each token must be of its version."""
        self._ends.set()
        self.join(60)
        assert not self.errors
        assert len(self.answers) == self.asked
        # Of many answers, a few of each version tell.
        by_versions: dict[tuple[int, ...], list[tuple[list[int], Completion]]] = {}
        for prompt, answer in self.answers:
            by_versions.setdefault(answer.versions, []).append((prompt, answer))
        for some in by_versions.values():
            for prompt, answer in [*some[:6], *some[-6:]]:
                assert_true_versions(answer, prompt)
        return {version for versions in by_versions for version in versions}


@pytest.mark.parametrize("kind", ["tokens", "completions"])
def test_requests_run_on_across_updates(make_vllm: Make, vllm: Process, kind: str) -> None:
    """Servers with the route for tokens freeze and continue them; older ones return them, and they are asked again."""
    vllm.tell(without=[] if kind == "tokens" else [TOKENS], step_seconds=0.03)
    rollout = make_vllm(vllm)
    drawn = vllm.drawn()
    background = Background(*(rollout.generate(PROMPT, endless(40, seed=seed)) for seed in range(4)))
    route = TOKENS if kind == "tokens" else COMPLETIONS
    wait_until(lambda: vllm.calls(route) == 4 and vllm.drawn() >= drawn + 12)  # each has begun
    for version in (1, 2):
        rollout.update(weights(version), version)
    for answer in background.result():
        assert len(answer.tokens) == 40
        assert {0, 2} <= set(answer.versions) <= {0, 1, 2}
        assert list(answer.versions) == sorted(answer.versions)
        assert_true_versions(answer)
    sent = vllm.calls(route)
    assert sent == 4 if kind == "tokens" else sent > 4
    assert rollout.counts.get("discarded", 0) == 0


def test_failed_load_keeps_running_requests(make_vllm: Make, vllm: Process) -> None:
    """The version before is loaded again, and frozen requests continue with it."""
    rollout = make_vllm(vllm)
    rollout.update(weights(1), 1)
    vllm.tell(step_seconds=0.03)
    background = Background(*(rollout.generate(PROMPT, endless(40, seed=seed)) for seed in range(2)))
    wait_until(lambda: vllm.calls(TOKENS) == 2)
    bad = (named._replace(name=named.name.replace("o_proj", "foo")) for named in weights(2))
    with pytest.raises(RuntimeError, match=r"no module or parameter named .*foo.*serves version 1"):
        rollout.update(bad, 2)
    for answer in background.result():
        assert answer.versions == (1,) * 40
        assert_true_versions(answer)
    assert vllm.calls(TOKENS) == 2


def test_load_after_a_wrong_shape_is_repeated(make_vllm: Make, vllm: Process) -> None:
    """vLLM refuses the load after it, too, and takes the one after that."""
    rollout = make_vllm(vllm)

    def wrong() -> Iterator[NamedTensor]:
        for name, tensor in weights(9):
            yield NamedTensor(name, tensor[:-1] if name == "model.norm.weight" else tensor)

    for version in (1, 3):  # nothing to restore, and a version before
        with pytest.raises(RuntimeError, match="Attempted to load weight"):
            rollout.update(wrong(), version)
        if version == 3:
            assert run(rollout.generate(PROMPT, endless(3)))[0].versions == (2,) * 3
        rollout.update(weights(2), 2)
        (answer,) = run(rollout.generate(PROMPT, endless(3)))
        assert answer.versions == (2,) * 3
        assert_drawn_from(replica(2), answer)


def test_requests_of_a_server_that_lost_its_weights_go_to_another(make_vllm: Make, vllms: list[Process]) -> None:
    """It never forwards with damaged weights: that would end it."""
    bad, good, _ = vllms
    rollout = make_vllm(bad, good, drain_seconds=2)
    for server in (bad, good):
        server.tell(step_seconds=0.03)
    background = Background(*(rollout.generate([i, *PROMPT], endless(30, seed=i)) for i in range(4)))
    wait_until(lambda: bad.calls(TOKENS) >= 1 and good.calls(TOKENS) >= 1)
    bad.can(LOAD, status=500, body="out of memory")
    with pytest.raises(RuntimeError, match=rf"out of memory.*{bad.url} is left out, {good.url} serves version 1"):
        rollout.update(weights(1), 1)
    assert all(len(answer.tokens) == 30 for answer in background.result())
    bad.tell(step_seconds=0.0)
    rollout.update(weights(2), 2)
    answers = run(*(rollout.generate([i, *PROMPT], endless(3)) for i in range(4)))
    assert {version for answer in answers for version in answer.versions} == {2}


def test_update_is_one_pause_and_one_load_for_each_server(make_vllm: Make, vllms: list[Process]) -> None:
    rollout = make_vllm(*vllms)
    load = Load(rollout)
    for version in (1, 2, 3):
        rollout.update(weights(version), version)
    assert 3 in load.end()
    for server in vllms:
        assert [server.calls(route) for route in (PAUSE, LOAD, RESUME)] == [3, 3, 3]


def test_answers_of_one_prompt_share_a_server(make_vllm: Make, vllms: list[Process]) -> None:
    """And the next turn goes there, too. Load is spread when one server has much more to do."""
    rollout = make_vllm(*vllms)
    long = [*PROMPT * 4]
    run(*(rollout.generate(long, endless(2, seed=seed)) for seed in range(4)))
    assert sorted(server.calls(TOKENS) for server in vllms) == [0, 0, 4]
    (first,) = [server for server in vllms if server.calls(TOKENS)]
    run(rollout.generate([*long, 5, 6, 7], endless(2)))
    assert first.calls(TOKENS) == 5
    run(*(rollout.generate([i, *long], endless(2)) for i in range(6)))
    assert all(server.calls(TOKENS) >= 2 for server in vllms)
    for server in vllms:
        server.tell(step_seconds=0.05)
    run(*(rollout.generate(long, endless(4, seed=seed)) for seed in range(30)))
    counts = sorted(server.calls(TOKENS) for server in vllms)
    assert counts[0] >= 6
    assert counts[-1] < 30


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates wait less for servers that are gone."""
    monkeypatch.setattr(fleet, "_GRACE_SECONDS", 1.0)


@pytest.mark.usefixtures("short_grace")
def test_server_killed_during_generation_and_back(make_vllm: Make, vllms: list[Process]) -> None:
    rollout = make_vllm(*vllms)
    rollout.update(weights(1), 1)
    load = Load(rollout)
    wait_until(lambda: all(server.calls(TOKENS) > 2 for server in vllms))
    vllms[0].kill()
    wait_until(lambda: rollout.counts.get("away", 0) >= 1)
    rollout.update(weights(2), 2)
    vllms[0].restart()
    wait_until(lambda: vllms[0].calls(TOKENS) > 2)
    assert load.end() == {1, 2}
    assert vllms[0].calls(LOAD) == 1
    assert rollout.counts["restarted"] == 1
    assert rollout.version == 2


@pytest.mark.usefixtures("short_grace")
def test_server_that_missed_updates_gets_only_the_last_one(make_vllm: Make, vllms: list[Process]) -> None:
    """And no request before."""
    missing, other, _ = vllms
    rollout = make_vllm(missing, other)
    rollout.update(weights(1), 1)
    missing.kill()
    for version in (2, 3, 4):
        rollout.update(weights(version), version)
    missing.restart()
    load = Load(rollout)
    wait_until(lambda: missing.calls(TOKENS) > 2)
    assert load.end() == {4}
    assert missing.calls(LOAD) == 1
    assert (rollout.counts["away"], rollout.counts["restarted"]) == (1, 1)


@pytest.mark.usefixtures("short_grace")
def test_server_that_never_returned_is_not_counted_as_restarted(make_vllm: Make, vllms: list[Process]) -> None:
    missing, other, _ = vllms
    rollout = make_vllm(missing, other)
    rollout.update(weights(1), 1)
    missing.kill()
    for version in (2, 3):
        rollout.update(weights(version), version)
    assert (rollout.counts["away"], rollout.counts["restarted"]) == (1, 0)
    rollout.close()
    missing.restart()


@pytest.mark.usefixtures("short_grace")
def test_server_killed_during_an_update_and_back(make_vllm: Make, vllms: list[Process]) -> None:
    rollout = make_vllm(*vllms, update_seconds=20)
    rollout.update(weights(1), 1)
    load = Load(rollout)
    vllms[0].tell(load_seconds=20.0)
    loads = threading.Thread(target=rollout.update, args=(weights(2), 2))
    loads.start()
    wait_until(lambda: vllms[0].calls(LOAD) == 2)
    vllms[0].kill()
    loads.join(12)
    assert not loads.is_alive(), "the others wait for a server that is gone"
    vllms[0].restart()
    wait_until(lambda: vllms[0].calls(TOKENS) > 2)
    assert load.end() == {1, 2}
    assert vllms[0].calls(LOAD) == 1
    (answer,) = run(rollout.generate(PROMPT, endless(3)))
    assert_drawn_from(replica(2), answer)
