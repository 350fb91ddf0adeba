"""Test server in a thread with the routes of vLLM and SGLang for weights over a process group. It receives over gloo, for real.

The state of an interrupted update is that of vLLM 0.32.0: a fused layer is loaded when it has as many elements as it needs, whichever they
are, and keeps what it has until ``/finish_weight_update``.

``python -m areal.tests.harness.servers.group.server`` runs a server in a process, and prints its port.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import GroupName, _new_process_group_helper, _world, rendezvous

from areal.tests.harness.servers.group.worker import SECONDS, Refused, Worker, describe

AT_ONCE = ("/get_world_size", "/weight_info", "/model_info", "/server_info", "/pause", "/resume")


class GroupServer:
    """One server.

    Attributes:
        calls: routes in order, with the mode of a pause.
        bodies: last body of each route.
        label: name of the weights.
        paused: whether generation has stopped.
        late: seconds that a route takes longer, by route.
        broken: status and text of the next answer, by route.
        dies_in: number of the call of a route that ends the server, by route.
        closes: routes whose next call is not answered: the connection is closed.
    """

    def __init__(self, shapes: dict[str, torch.Size], workers: int = 1, replicas: int = 1) -> None:
        self.shapes, self.replicas = shapes, replicas
        self.workers = [Worker(shapes) for _ in range(workers)]
        self.calls: list[str] = []
        self.bodies: dict[str, Any] = {}
        self.label, self.paused = "default", False
        self.late: dict[str, float] = {}
        self.broken: dict[str, tuple[int, str]] = {}
        self.dies_in: dict[str, int] = {}
        self.closes: set[str] = set()
        self.packed: int | None = None
        self.world: tuple[int, int] = (0, 0)  # first rank, and size
        self.busy = threading.Lock()
        self._sockets: list[socket.socket] = []
        handler = type("GroupHandler", (_Handler,), {"server_state": self})
        self._http = _Listener(("127.0.0.1", 0), handler)
        self.port = int(self._http.server_address[1])
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start_anew(self) -> None:
        """Forget everything, as a new process under the same address."""
        for worker in self.workers:
            worker.leave()
        self.workers = [Worker(self.shapes) for _ in self.workers]
        self.label, self.paused = "default", False

    def die(self) -> None:
        """Close all connections, as the end of a process does."""
        threading.Thread(target=self._http.shutdown, daemon=True).start()
        self._http.server_close()
        for worker in self.workers:
            worker.leave()
        for connection in self._sockets:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def each(self, work: Callable[[int, Worker], None]) -> None:
        """Call a function for each worker at once."""
        with ThreadPoolExecutor(len(self.workers)) as pool:
            for future in [pool.submit(work, i, worker) for i, worker in enumerate(self.workers)]:
                future.result()

    def answer(self, route: str, body: dict[str, Any], query: str) -> Any:
        match route:
            case "/get_world_size":
                return {"world_size": len(self.workers) // (self.replicas if "include_dp=false" in query else 1)}
            case "/weight_info" | "/model_info":
                return {"weight_version": self.label}
            case "/server_info":
                return {
                    "tp_size": len(self.workers),
                    "pp_size": 1,
                    "dp_size": 1,
                    "model_path": "x",
                    "version": "0.5.23",
                }
            case "/pause" | "/pause_generation":
                self.paused = True
                return {"status": "paused"}
            case "/resume" | "/continue_generation":
                self.paused = False
                return {"status": "resumed"}
            case "/init_weight_transfer_engine":
                return self.init(body["init_info"])
            case "/shutdown_weight_transfer_engine":
                if any(worker.active for worker in self.workers):
                    raise Refused("Cannot release a trainer connection during a weight update")
                self.each(lambda i, worker: worker.leave())
                return {"message": "Weight transfer shut down"}
            case "/start_weight_update":
                # Each worker decides for itself.
                active = [worker.active for worker in self.workers]
                for worker in self.workers:
                    worker.active = True
                if any(active):
                    raise Refused("start_weight_update called while a weight update is already active")
                return {"message": "Weight update started"}
            case "/update_weights":
                self.update(body["update_info"])
                return {"message": "Weights updated"}
            case "/finish_weight_update":
                return self.finish(body["weight_version"])
        return self.answer_sglang(route, body)

    def answer_sglang(self, route: str, body: dict[str, Any]) -> Any:
        worker = self.workers[0]
        match route:
            case "/init_weights_update_group":
                worker.group = join_like_sglang(body)
                return {"success": True, "message": "Succeeded to initialize custom process group."}
            case "/destroy_weights_update_group":
                if worker.group is None:
                    raise ValueError("The group to be destroyed does not exist.")
                group, worker.group = worker.group, None
                dist.destroy_process_group(group)
                return {"success": True, "message": "Succeeded to destroy custom process group."}
            case "/begin_weight_update":
                if worker.active:
                    raise ValueError("a weight-update session is already open; call end_weight_update() first")
                worker.active = True
                return {"success": True, "message": "Success"}
            case "/end_weight_update":
                if not worker.active:
                    raise ValueError("no weight-update session is open; call begin_weight_update() first")
                worker.active = False
                return {"success": True, "message": "Success"}
            case "/update_weights_from_distributed":
                if not worker.active:
                    raise ValueError(
                        "update_weights_from_distributed must run between begin_weight_update() and end_weight_update()"
                    )
                worker.in_place = True
                worker.receive(body["names"], body["dtypes"], body["shapes"], None)
                return {"success": True, "message": "Succeeded to update parameter online."}
            case "/flush_cache":
                return None
            case "/update_weight_version":
                self.label = body["new_version"]
                return {"success": True, "message": "", "new_version": self.label}
        return KeyError(route)

    def init(self, info: dict[str, Any]) -> Any:
        if info == {"packed": True}:  # backend ``ipc``: nothing is to be joined
            return {"message": "Weight transfer initialized"}
        if "src_mesh_dims" in info:
            self.each(lambda i, worker: worker.join_shards(info, i))
            return {"message": "Weight transfer initialized"}
        self.world = (info["rank_offset"], info["world_size"])
        self.packed = info["packed_buffer_size_bytes"] if info.get("packed") else None
        timeout = timedelta(seconds=SECONDS)

        def join(i: int, worker: Worker) -> None:
            store = dist.TCPStore(info["master_address"], info["master_port"], is_master=False, timeout=timeout)
            worker.group = dist.ProcessGroupGloo(store, info["rank_offset"] + i, info["world_size"], timeout)

        self.each(join)
        return {"message": "Weight transfer initialized"}

    def update(self, info: dict[str, Any]) -> None:
        if not all(worker.active for worker in self.workers):
            raise Refused("start_weight_update must be called before update_weights.")

        def receive(i: int, worker: Worker) -> None:
            try:
                if "ipc_handles_pickled" in info:
                    worker.read(info, f"gpu-{i}")
                elif "shapes" not in info:
                    worker.receive_shards(info["names"])
                else:
                    worker.receive(info["names"], info["dtype_names"], info["shapes"], self.packed)
            except BaseException:
                worker.active = False
                raise

        self.each(receive)

    def finish(self, label: str) -> Any:
        if not all(worker.active for worker in self.workers):
            raise Refused("finish_weight_update called without a matching start_weight_update.")
        for worker in self.workers:
            worker.reset()
            worker.active = False
        self.label = label
        return {"message": "Weight update finished"}


class _Listener(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """Ignore clients that disconnect."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16
    server_state: GroupServer

    def log_message(self, *_: Any) -> None:
        pass

    def setup(self) -> None:
        super().setup()
        self.server_state._sockets.append(self.connection)

    def do_GET(self) -> None:
        self.handle_call({})

    def do_POST(self) -> None:
        self.handle_call(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def handle_call(self, body: dict[str, Any]) -> None:
        state = self.server_state
        parts = urlsplit(self.path)
        if parts.path == "/test":
            return self.reply({"calls": state.calls, "weights": describe(state.workers[0]), "label": state.label})
        state.calls.append(parts.path + (f"?{parts.query}" if parts.query else ""))
        state.bodies[parts.path] = body
        called = sum(urlsplit(call).path == parts.path for call in state.calls)
        if called >= state.dies_in.get(parts.path, called + 1):
            return state.die()
        if parts.path in state.closes:
            state.closes.remove(parts.path)
            self.close_connection = True
            return None
        time.sleep(state.late.get(parts.path, 0.0))
        if parts.path in state.broken:
            status, text = state.broken.pop(parts.path)
            return self.reply({"error": {"message": text}}, status)
        try:
            # The engine calls its workers one call at a time.
            with contextlib.nullcontext() if parts.path in AT_ONCE else state.busy:
                answer = state.answer(parts.path, body, parts.query)
        except ValueError as error:
            return self.reply({"success": False, "message": str(error)}, 400)
        except Exception as error:
            return self.reply({"error": {"message": f"Worker failed with error {error}"}}, 500)
        return self.reply(answer, 404 if isinstance(answer, KeyError) else 200)

    def reply(self, content: Any, status: int = 200) -> None:
        data = json.dumps(content, default=str).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def join_like_sglang(body: dict[str, Any]) -> Any:
    """Join a group as ``init_custom_process_group`` of SGLang does."""
    where = f"tcp://{body['master_address']}:{body['master_port']}"
    timeout = timedelta(seconds=SECONDS)
    store, rank, size = next(rendezvous(where, body["rank_offset"], body["world_size"], timeout=timeout))
    store.set_timeout(timeout)
    group, _ = _new_process_group_helper(
        size,
        rank,
        [],
        dist.Backend(body["backend"]),
        dist.PrefixStore(body["group_name"], store),
        group_name=GroupName(body["group_name"]),
        timeout=timeout,
    )
    _world.pg_group_ranks[group] = {i: i for i in range(size)}
    return group


def main() -> None:
    torch.set_num_threads(1)
    shapes = {name: torch.Size(shape) for name, shape in json.loads(sys.argv[1]).items()}
    server = GroupServer(shapes)
    print(server.port, flush=True)
    sys.stdin.read()  # until the test ends


if __name__ == "__main__":
    main()
