"""Weights over a process group into servers that receive for real, over gloo, and answer as vLLM and SGLang do."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn

from areal.api.weights import NamedTensor
from areal.inference.http import VLLM, SGLang
from areal.inference.http.group import GlooCarrier, TorchCarrier
from areal.inference.http.group.chunk import ChunkMemory, cut_chunks
from areal.inference.http.group.sender import Members
from areal.inference.http.servers.sglang import SGLangDestroyGroup
from areal.tests.harness.limits import promptly
from areal.tests.harness.servers.group.sending import GroupSending, version_in
from areal.tests.harness.servers.group.server import GroupServer
from areal.tests.unit.inference.group.sent_weights import SHAPES, Q, Weights, assert_has, interrupted_after
from areal.weight_sync.apply import ModuleSource

ONE_AFTER_THE_OTHER = 1
"""Value of ``chunk_bytes`` for chunks of one tensor."""

Make = Callable[..., GroupSending]


@pytest.fixture
def servers() -> Iterator[list[GroupServer]]:
    started = [GroupServer(SHAPES), GroupServer(SHAPES, workers=2)]
    yield started
    for server in started:
        server.die()


@pytest.fixture
def make(servers: list[GroupServer]) -> Iterator[Make]:
    with ExitStack() as stack:

        def make_one(**options: Any) -> GroupSending:
            options = {"packed_bytes": None, "chunk_bytes": ONE_AFTER_THE_OTHER, **options}
            urls = [server.url for server in servers]
            return stack.enter_context(GroupSending(urls, VLLM(), GlooCarrier(), **options))

        yield make_one


@pytest.mark.parametrize("packed_bytes", [None, 1, 300, 2**30])
@pytest.mark.parametrize("chunk_bytes", [ONE_AFTER_THE_OTHER, 500, 2**30])
def test_all_workers_of_all_servers_have_the_weights_of_each_update(
    make: Make, servers: list[GroupServer], packed_bytes: int | None, chunk_bytes: int
) -> None:
    transport = make(packed_bytes=packed_bytes, chunk_bytes=chunk_bytes)
    for version in range(2):
        weights = Weights(version)
        meta = transport.send(weights, version)
        assert (meta.version, meta.n_tensors) == (version, len(SHAPES))
        for server in servers:
            assert_has(server, weights)
            assert (version_in(server.label), server.paused) == (str(version), False)
    # One group for both updates.
    assert [server.world for server in servers] == [(1, 4), (2, 4)]
    assert [server.calls.count("/init_weight_transfer_engine") for server in servers] == [1, 1]


def test_packed_buffers_end_after_the_tensor_that_exceeds_their_size() -> None:
    tensors = [
        NamedTensor(str(i), torch.zeros(size, dtype=torch.uint8)) for i, size in enumerate([60, 40, 1, 200, 30, 70, 5])
    ]
    cpu = torch.device("cpu")
    (whole,) = cut_chunks(tensors, ChunkMemory(1000, cpu), 100)
    assert [len(buffer) for buffer in whole.buffers] == [101, 200, 105]
    # The end of a chunk ends a buffer too.
    chunks = cut_chunks(tensors, ChunkMemory(160, cpu), 100)
    assert [[len(buffer) for buffer in chunk.buffers] for chunk in chunks] == [[101], [200], [105]]


def test_server_whose_restart_was_noticed_joins_again(make: Make, servers: list[GroupServer]) -> None:
    """Also if it has the label of the last update, because it has loaded that since."""
    transport = make()
    transport.send(Weights(0), 0)
    label = servers[0].label
    servers[0].start_anew()
    servers[0].label = label
    transport.servers[0].restarts += 1
    transport.send(Weights(1), 1)
    for server in servers:
        assert_has(server, Weights(1))


def test_requests_of_an_update_come_in_order(make: Make, servers: list[GroupServer]) -> None:
    transport = make(chunk_bytes=2**30)
    transport.send(Weights(0), 0)
    servers[0].calls.clear()
    transport.send(Weights(1), 1)
    assert servers[0].calls == [
        "/health",
        "/weight_info",
        "/pause?mode=abort",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/resume",
    ]
    assert servers[0].bodies["/update_weights"]["update_info"] == {
        "names": list(SHAPES),
        "dtype_names": ["float32"] * len(SHAPES),
        "shapes": [list(shape) for shape in SHAPES.values()],
    }


def test_cast_is_announced_and_sent(make: Make, servers: list[GroupServer]) -> None:
    weights = Weights(0)
    make(cast=torch.bfloat16, packed_bytes=100).send(weights, 0)
    assert_has(servers[1], weights, torch.bfloat16)


def test_servers_generate_until_the_first_tensors_are_ready(make: Make, servers: list[GroupServer]) -> None:
    seen: list[bool] = []
    make(chunk_bytes=2**30).send(Weights(0, lambda name: seen.append(servers[0].paused)), 0)
    assert seen == [False] * len(SHAPES)


@pytest.mark.parametrize("name", [Q, "layers.0.norm.weight"])
def test_next_update_heals_servers_that_were_interrupted_by_the_source(
    make: Make, servers: list[GroupServer], name: str
) -> None:
    transport = make()
    transport.send(Weights(0), 0)
    with pytest.raises(RuntimeError, match=r"the source broke.*refused until"):
        transport.send(Weights(1, interrupted_after(name)), 1)
    assert set(transport.faults) == {server.url for server in servers}
    assert [server.label for server in servers] == ["interrupted"] * 2
    transport.send(Weights(2), 2)
    for server in servers:
        assert_has(server, Weights(2))
        assert (version_in(server.label), server.paused) == ("2", False)
    assert not transport.faults


@pytest.mark.parametrize("closes", [False, True])
@pytest.mark.parametrize("when", ["transfer", "commit"])
def test_ctrl_c_in_an_update_leaves_no_server_paused(
    servers: list[GroupServer], when: str, closes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    last = Weights(2)
    with GroupSending([server.url for server in servers], VLLM(), GlooCarrier(), chunk_bytes=1) as transport:
        transport.send(Weights(0), 0)
        with monkeypatch.context() as patched:
            if when == "commit":
                patched.setattr(Members, "label", stop)
            interrupted = Weights(1, interrupted_after(Q, KeyboardInterrupt())) if when == "transfer" else Weights(1)
            with pytest.raises(KeyboardInterrupt):
                transport.send(interrupted, 1)
        if not closes:
            transport.send(last, 2)
    assert [server.paused for server in servers] == [False, False]
    for server in [] if closes else servers:
        assert_has(server, last)


def test_next_update_heals_servers_of_which_one_refused_a_tensor(make: Make, servers: list[GroupServer]) -> None:
    """The tensors before it stay in the workers, and would be taken for those of the next update."""
    transport = make()
    transport.send(Weights(0), 0)
    wrong = Weights(1)
    wrong.tensors = {("layers.0.x_proj" if "k_proj" in name else name): t for name, t in wrong.tensors.items()}
    with promptly(), pytest.raises(RuntimeError, match=rf"{servers[0].url}/update_weights.*named 'layers.0.x_proj'"):
        transport.send(wrong, 1)
    transport.send(Weights(2), 2)
    for server in servers:
        assert_has(server, Weights(2))


@pytest.mark.parametrize("route", ["/start_weight_update", "/init_weight_transfer_engine"])
def test_server_that_refuses_an_update_is_named_and_keeps_the_others(
    make: Make, servers: list[GroupServer], route: str
) -> None:
    transport = make(timeout=6)
    if route != "/init_weight_transfer_engine":
        transport.send(Weights(9), 9)
    servers[1].broken[route] = (500, "not now")
    with promptly(), pytest.raises(RuntimeError, match=f"{servers[1].url}{route}: status 500.*not now"):
        transport.send(Weights(0), 0)
    assert route == "/start_weight_update" or not any(server.paused for server in servers)
    transport.send(Weights(1), 1)
    for server in servers:
        assert_has(server, Weights(1))


def test_server_that_did_not_finish_is_refused_alone(make: Make, servers: list[GroupServer]) -> None:
    transport = make()
    transport.send(Weights(9), 9)
    servers[0].broken["/finish_weight_update"] = (500, "no memory")
    with pytest.raises(RuntimeError, match=r"no memory.*it serves wherever it arrived"):
        transport.send(Weights(0), 0)
    assert list(transport.faults) == [servers[0].url]
    transport.send(Weights(1), 1)
    assert_has(servers[0], Weights(1))
    assert version_in(servers[0].label) == version_in(servers[1].label) == "1"


@pytest.mark.parametrize("call", [1, 3])
def test_server_that_dies_is_named_within_seconds(make: Make, servers: list[GroupServer], call: int) -> None:
    transport = make(timeout=60)
    servers[0].dies_in["/update_weights"] = call
    with promptly(), pytest.raises(RuntimeError, match=rf"did not reach every server: {servers[0].url}"):
        transport.send(Weights(0), 0)
    # The other one is ready for the next update.
    assert not servers[1].workers[0].active
    transport.send(Weights(1), 1)
    assert_has(servers[1], Weights(1))
    assert list(transport.faults) == [servers[0].url]


def test_server_that_hangs_is_named_after_the_time_limit(make: Make, servers: list[GroupServer]) -> None:
    transport = make(timeout=1.0)
    transport.send(Weights(0), 0)
    servers[1].late["/update_weights"] = 60.0
    with promptly(), pytest.raises(RuntimeError, match=rf"{servers[1].url}.*no answer within 1 s"):
        transport.send(Weights(1), 1)


@pytest.mark.parametrize("active", [True, False])
def test_servers_of_a_trainer_that_died_are_taken_over(make: Make, servers: list[GroupServer], active: bool) -> None:
    """It has left them in the middle of an update, with some of the tensors of a fused layer."""
    for server in servers:
        for worker in server.workers:
            worker.active = active
            worker.load(Q, torch.zeros(SHAPES[Q]))
    make().send(Weights(0), 0)
    for server in servers:
        assert_has(server, Weights(0))


def test_connection_that_the_server_closes_is_opened_again(make: Make, servers: list[GroupServer]) -> None:
    """As after an error: the next request finds the connection closed."""
    transport = make()
    transport.send(Weights(0), 0)
    servers[0].closes.add("/weight_info")
    transport.send(Weights(1), 1)
    assert_has(servers[0], Weights(1))


def test_server_that_was_started_anew_joins_with_the_next_update(make: Make, servers: list[GroupServer]) -> None:
    transport = make()
    transport.send(Weights(0), 0)
    servers[0].start_anew()
    transport.send(Weights(1), 1)
    for server in servers:
        assert_has(server, Weights(1))


def test_selection_is_refused(make: Make) -> None:
    with pytest.raises(ValueError, match="select: servers over a process group receive all tensors"):
        make().send(Weights(0), 0, select=lambda name: "q_proj" in name)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"timeout": 0}, "timeout = 0"),
        ({"packed_bytes": -1}, "packed_bytes = -1"),
        ({"chunk_bytes": 0}, "chunk_bytes = 0"),
    ],
)
def test_sizes_must_be_positive(make: Make, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make(**options)


def test_module_arrives_under_its_names(make: Make) -> None:
    module = nn.ModuleDict({"embed": nn.Embedding(3, 4), "norm": nn.LayerNorm(4)})
    server = GroupServer({name: parameter.shape for name, parameter in module.named_parameters()})
    with GroupSending([server.url], VLLM(), GlooCarrier()) as transport:
        transport.send(ModuleSource(module), 3)
        torch.testing.assert_close(server.workers[0].weights, dict(module.named_parameters()), rtol=0, atol=0)
    assert server.workers[0].group is None
    server.die()


def test_groups_of_two_rollouts_have_a_name_each() -> None:
    dialect = SGLang()
    first, second = dialect.group, dialect.group
    for name, routes in (("first", first), ("second", second)):
        where = {"master_address": "127.0.0.1", "master_port": 1, "backend": "gloo", "group_name": name}
        routes.join(where, 1, 2, None)
    assert [routes.leave[0].body for routes in (first, second)] == [
        SGLangDestroyGroup(group_name="first"),
        SGLangDestroyGroup(group_name="second"),
    ]


def test_sglang_receives_over_a_named_group() -> None:
    shapes = json.dumps({name: list(shape) for name, shape in SHAPES.items()})
    command = [sys.executable, "-m", "areal.tests.harness.servers.group.server", shapes]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = f"http://127.0.0.1:{int(process.stdout.readline())}"
        carrier = TorchCarrier(backend="gloo", device="cpu")
        transport = GroupSending([url], SGLang(), carrier, chunk_bytes=300)
        try:
            transport.send(Weights(0), 0)
            with pytest.raises(RuntimeError, match="the source broke"):
                transport.send(Weights(1, interrupted_after(Q)), 1)
            weights = Weights(2)
            transport.send(weights, 2)
            with urllib.request.urlopen(f"{url}/test", timeout=10) as answer:
                told = json.loads(answer.read())
        finally:
            transport.close()
            process.kill()
    expected = {name: float(tensor.double().sum()) for name, tensor in weights.tensors.items()}
    assert told["weights"] == pytest.approx(expected)
    assert version_in(told["label"]) == "2"
    first = told["calls"][: told["calls"].index("/continue_generation") + 1]
    assert [call for call in first if call != "/update_weights_from_distributed"] == [
        "/server_info",
        "/v1/models",
        "/model_info",
        "/tokenize",
        "/update_weight_version",
        "/health",
        "/model_info",
        "/destroy_weights_update_group",
        "/server_info",
        "/init_weights_update_group",
        "/pause_generation",
        "/update_weight_version",  # until the end, they are the weights of no version
        "/end_weight_update",  # fails: no session is open
        "/begin_weight_update",
        "/end_weight_update",
        "/flush_cache",
        "/update_weight_version",
        "/update_weight_version",  # that the owner insists on
        "/continue_generation",
    ]


def test_carriers_refuse_devices_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="backend = 'nccl' with device = 'cpu'"):
        TorchCarrier(device="cpu")
