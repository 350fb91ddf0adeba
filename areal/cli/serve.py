"""``areal serve``: a training server for clients of the ``tinker`` SDK."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import signal
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from areal.inference.embedded_server import EmbeddedServer, listen
from areal.tinker.api.app import create_app
from areal.tinker.api.http_settings import MIB, ApiSettings
from areal.tinker.api.key_file import User, read_users
from areal.tinker.backends.backend_registry import create_backends
from areal.tinker.service.service import Service
from areal.tinker.service.settings import ServiceLimits, ServiceSettings

logger = logging.getLogger(__name__)

NO_SAMPLER = "none"


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Serve a model to clients of the tinker SDK, which train adapters of it and sample from them.

    Attributes:
        model: Directory or hub name of the base model.
        backend: Backend that trains, with its layout: fsdp:d2, megatron:t2, or one of another package.
        backend_config: Settings of the backend, as a JSON object.
        sampler: Backend that samples, or none.
        sampler_config: Settings of the sampler, as a JSON object.
        name: Names under which clients may ask for the model. Clients that sample load their tokenizer by the first.
            Defaults to the model and the last part of its path.
        host: Address to listen on. Other machines can reach 0.0.0.0.
        port: Port to listen on; 0 for a free one.
        root: Folder of checkpoints and of the SQLite database.
        database: SQLAlchemy URL of another database, such as postgresql://….
        owner: Name of the only owner, without users in a key file.
        api_key_file: TOML file of users with their keys, roles and quotas, or file with one key per line. Without it, any key is accepted.
        max_body_mib: Largest body of training data, in MiB after decompression.
        max_json_mib: Largest body of any other request, in MiB.
        hold_s: Seconds for which a request for a result waits. Below 45, after which a client gives up.
        max_connections: Most open connections. A further one is closed.
        read_timeout_s: Seconds in which the head of a request must arrive, and each further piece of its body.
        link_lifetime_s: Seconds for which a download link is valid.
        allowed_hosts: Host names under which the server answers, such as train.example.org. Without any, it answers under all.
        trusted_proxies: Addresses or networks of proxies, whose X-Forwarded-Proto gives download links their scheme.
        limits: Times and sizes.
    """

    model: str
    backend: str = "fsdp:d1"
    backend_config: str = "{}"
    sampler: str = "local"
    sampler_config: str = "{}"
    name: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    root: Path = Path("runs/tinker")
    database: str | None = None
    owner: str = ServiceSettings.owner
    api_key_file: Path | None = None
    max_body_mib: int = ApiSettings.max_body_bytes // MIB
    max_json_mib: int = ApiSettings.max_json_bytes // MIB
    hold_s: float = ApiSettings.hold_s
    max_connections: int = ApiSettings.max_connections
    read_timeout_s: float = ApiSettings.read_timeout_s
    link_lifetime_s: int = ApiSettings.link_lifetime_s
    allowed_hosts: tuple[str, ...] = ()
    trusted_proxies: tuple[str, ...] = ()
    limits: tyro.conf.OmitArgPrefixes[ServiceLimits] = field(default_factory=ServiceLimits)

    @functools.cached_property
    def users(self) -> tuple[User, ...]:
        """Users of the key file."""
        return () if self.api_key_file is None else read_users(self.api_key_file, self.owner)

    @property
    def api_settings(self) -> ApiSettings:
        """Settings of the HTTP layer."""
        return ApiSettings(
            users=self.users,
            owner=self.owner,
            max_body_bytes=self.max_body_mib * MIB,
            max_json_bytes=self.max_json_mib * MIB,
            hold_s=self.hold_s,
            max_connections=self.max_connections,
            read_timeout_s=self.read_timeout_s,
            link_lifetime_s=self.link_lifetime_s,
            allowed_hosts=self.allowed_hosts,
        )

    @property
    def service_settings(self) -> ServiceSettings:
        """Settings of the service."""
        # Clients load their tokenizer by the first name, from another directory.
        model = str(Path(self.model).resolve()) if Path(self.model).is_dir() else self.model
        return ServiceSettings(
            root=self.root,
            base_models=self.name or tuple(dict.fromkeys((model, self.model, Path(self.model).name))),
            model_path=model,
            database_url=self.database,
            owner=self.owner,
            quotas={user.name: user.quotas for user in self.users},
            **vars(self.limits),
        )


def run_serve(options: list[str]) -> None:
    """Run ``areal serve`` with the options of the command line."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        failure = _serve(parse_options(options))
    except (ValueError, OSError, RuntimeError) as error:
        logger.debug("areal serve failed", exc_info=True)
        sys.exit(f"areal serve: {error}")
    if failure is not None:
        sys.exit(f"areal serve: {failure}")


def parse_options(options: list[str]) -> ServeOptions:
    """Return the options of a command line."""
    return tyro.cli(ServeOptions, prog="areal serve", args=options)


def _serve(options: ServeOptions) -> Exception | None:
    """Serve until a signal, or until the service cannot go on. Returns the reason of the latter."""
    api, settings = options.api_settings, options.service_settings
    training_config = _object("backend_config", options.backend_config)
    sampling_config = _object("sampler_config", options.sampler_config)
    # The port is taken before the model is loaded: a port in use is reported at once.
    with listen(options.host, options.port) as listener:
        model, sampler = options.model, options.sampler
        sampling_name = None if sampler == NO_SAMPLER else sampler
        training, sampling = create_backends(model, options.backend, training_config, sampling_name, sampling_config)
        service = Service(training, sampling, settings)
        served = f"{model} ({options.backend}, sampler {sampler})"
        banner = _banner(listener, options.host, served, settings.base_models[0], bool(api.users))
        app = create_app(service, api)
        config = server_config(app, options)
        # The loop that uvicorn takes by itself: uvloop where it is installed.
        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            return runner.run(_run(service, config, app.state.context.stopping, listener, banner))


def server_config(app: Any, options: ServeOptions) -> uvicorn.Config:
    """Return the settings of the HTTP server of an application."""
    return uvicorn.Config(
        app,
        http=connection_class(options.max_connections, options.read_timeout_s),
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=bool(options.trusted_proxies),
        forwarded_allow_ips=list(options.trusted_proxies),
        # Idle connections are kept longer than a client's pause between steps.
        timeout_keep_alive=120,
        timeout_graceful_shutdown=10,
    )


def _object(option: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{option}={text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{option}={text!r} must be a JSON object, such as {{}}")
    return value


def _banner(listener: socket.socket, host: str, served: str, base_model: str, needs_key: bool) -> str:
    """Return what is served and how to connect. Keys are not printed."""
    port = listener.getsockname()[1]
    reachable = socket.gethostname() if host in ("0.0.0.0", "::", "") else host
    url = f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"
    key = "one of the keys in --api-key-file" if needs_key else "tml-anything (no key is checked)"
    return "\n".join(
        (
            f"areal serves {served}",
            f"  TINKER_BASE_URL  {url}",
            f"  TINKER_API_KEY   {key}",
            f"  base_model       {base_model}",
            f"  status page      {url}/   metrics: {url}/metrics   API: {url}/docs (its page loads scripts from the internet)",
        )
    )


async def _run(
    service: Service, config: uvicorn.Config, stopping: asyncio.Event, listener: socket.socket, banner: str
) -> Exception | None:
    """Serve until a signal, or until the service cannot go on. Returns the reason of the latter."""
    # Signals are for this function: the service stops after the server, and before the process ends.
    server = EmbeddedServer(config)

    def stop() -> None:
        # Held requests are answered at once.
        server.should_exit = True
        stopping.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    await service.start()
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    failed = asyncio.ensure_future(service.failed())
    print(banner, flush=True)
    try:
        await asyncio.wait({serving, failed}, return_when=asyncio.FIRST_COMPLETED)
        reason = failed.result() if failed.done() else None
        stop()
        await serving
        return reason
    finally:
        failed.cancel()
        await service.stop()


GRACE_S = 1.0
"""Seconds after the time of a request, in which a loop that was busy receives what has arrived."""


def connection_class(max_connections: int, read_timeout_s: float) -> type[HttpToolsProtocol]:
    """Return the class of a server's connections.

    Args:
        max_connections: most open connections. A further one is closed at once.
        read_timeout_s: seconds in which the head of a request must arrive, and each further piece of its body.
    """

    class Connection(HttpToolsProtocol):
        """A connection that is closed if the client does not finish a request."""

        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > max_connections:
                transport.abort()
            else:
                self._wait()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop()
            super().connection_lost(exc)

        def on_message_begin(self) -> None:
            self._wait()
            super().on_message_begin()

        def on_body(self, body: bytes) -> None:
            self._wait()
            super().on_body(body)

        def on_message_complete(self) -> None:
            self._stop()
            super().on_message_complete()

        def _wait(self) -> None:
            self._stop()
            self._deadline = self.loop.call_later(read_timeout_s, self._look_again)

        def _look_again(self) -> None:
            self._deadline = self.loop.call_later(min(GRACE_S, read_timeout_s), self.transport.abort)

        def _stop(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    return Connection
