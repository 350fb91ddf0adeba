"""Ways of an engine's weights to the servers of a fleet: a folder with the model or an adapter, which is checked, or a process group."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import torch

from areal.api.control import Control
from areal.api.engine import TrainEngine
from areal.api.weights import NamedTensor
from areal.engine.checkpoint.atomic_dir import prune
from areal.engine.checkpoint.safetensors import TensorFiles
from areal.engine.model.hub import read_config
from areal.engine.model.media import model_factory
from areal.inference.http.fleet import Fleet
from areal.inference.http.group.chunk import PACKED_BYTES
from areal.inference.http.group.sender import Members
from areal.inference.http.group.transports import AnyCarrier, transport_by
from areal.inference.http.server_state import Away
from areal.inference.http.servers.dialect import Dialect
from areal.utils.distributed import EngineLostError
from areal.weight_sync.apply import Replica, StreamSource
from areal.weight_sync.disk import DiskTransport, version_name
from areal.weight_sync.transport import Transport

logger = logging.getLogger(__name__)

_KEPT = 2
"""Versions of a model or an adapter that stay in the folder after an update."""


class WeightUpdates:
    """Updates of the servers of a fleet. All methods are collective over ``control``.

    Args:
        control: control plane over the ranks of the trainer.
        fleet: the servers, on the rank that owns them; empty on others.
        dialect: kind of server.
        folder: directory for weights; ``None`` if a carrier sends them.
        model: directory or hub name of the model, whose configuration is written with the weights.
        cast: dtype in which weights are written or sent.
    """

    def __init__(
        self,
        control: Control,
        fleet: Fleet,
        dialect: Dialect,
        folder: Path | None,
        model: str | None,
        cast: torch.dtype | None,
    ) -> None:
        self._control, self._fleet, self._dialect = control, fleet, dialect
        self._folder, self._complete = folder, Completeness(model)
        self._transport: Transport | None = None
        self._members: Members | None = None
        if folder is not None:
            self._transport = DiskTransport(control, folder, keep=None, model=model, cast=cast)

    def send_by(self, carrier: AnyCarrier, members: Members, cast: torch.dtype | None, seconds: float) -> None:
        """Send the model's weights over a process group, or by handles of memory, from now on.

        Args:
            carrier: carrier of the tensors.
            members: the servers as members of the group.
            cast: dtype in which weights are sent.
            seconds: time limit of each step.
        """
        self._members = servers = members if self._control.rank == 0 else None
        routes = self._dialect.group
        if routes is None:
            raise ValueError(f"carrier = {carrier!r}: servers of this kind get weights by files only: leave it None")
        packed = PACKED_BYTES if routes.packs else None
        self._transport = transport_by(
            carrier, self._control, servers, routes, cast=cast, timeout=seconds, packed_bytes=packed
        )

    def sync(self, engine: TrainEngine, version: int) -> None:
        """Send an engine's weights, or its selected adapter if the dialect has one."""
        self._control.attempt(self.check)  # one rank knows the servers
        if self._dialect.adapter is None:
            self._send(engine, version)
            self._load_written(version)
        else:
            path = self._require_folder() / version_name(version)
            engine.adapters.save(engine.adapters.selected, path)
            self._load_last(path, version)

    def _send(self, engine: TrainEngine, version: int) -> None:
        """Send an engine's weights. A server that dies while a process group sends them is left out, and the others get them once more."""
        while True:
            try:
                self._require_transport().send(engine, version)
                return
            except EngineLostError:
                raise
            except RuntimeError as error:
                # Each attempt is without the servers that the one before has lost.
                lost, left = self._control.gather(([], 0) if self._members is None else self._members.lost())[0]
                if not lost or not left:
                    raise
                logger.warning("version %d is sent again, without %s: %s", version, ", ".join(lost), error)

    def update(self, tensors: Iterator[NamedTensor], version: int) -> None:
        """Send a stream of full tensors. It can be read once, so that a server that dies in it ends it."""
        self._control.attempt(self.check)  # one rank knows the servers
        if self._dialect.adapter is not None:
            raise ValueError(
                f"adapter = {self._dialect.adapter!r}: a stream of tensors lacks the adapter's configuration: call sync()"
            )
        self._require_transport().send(StreamSource(tensors), version)
        self._load_written(version)

    def load(self, folder: str | Path, version: int) -> None:
        """Load a directory on all servers."""
        path = str(Path(folder).resolve())
        self._control.attempt(lambda: self._load(path, version))

    def check(self) -> None:
        """Raise unless the servers of this rank answer with what an update replaces.

        Raises:
            ValueError: an adapter answers, and the model would be sent.
        """
        for server in self._fleet.servers:
            serves = None if server.routes is None else server.routes.served.adapter
            if serves is not None:
                raise ValueError(
                    f"VLLM.model = {serves!r} is an adapter, which {server.url} would add to the new weights of the model: pass adapter= to "
                    "send an engine's adapter, or leave model out"
                )

    def close(self) -> None:
        """Leave the process group, and remove what is half written."""
        if self._transport is not None:
            self._transport.close()

    def _load_written(self, version: int) -> None:
        """Load what the transport has written, if it writes."""
        if isinstance(self._transport, DiskTransport):
            self._load_last(self._require_folder() / version_name(version), version)

    def _load_last(self, path: Path, version: int) -> None:
        """Load a version on all servers. After an error all versions stay: servers go on with the one that they had."""
        self.load(path, version)
        # A server that was started anew loads this version, and one whose next load fails loads it again.
        self._control.attempt(lambda: prune(path.parent, _KEPT) if self._control.rank == 0 else [])

    def _load(self, folder: str, version: int) -> None:
        """Load a version on all servers of this rank."""
        servers = self._fleet.servers
        if not servers:
            return
        if self._dialect.adapter is None:
            told = [server.routes.served for server in servers if server.routes is not None]
            self._complete.check(Path(folder), fully=not all(each.checks_weights for each in told))
        faults = self._fleet.submit(self._fleet.load(folder, version)).result()
        # All servers had their attempt; report what each one serves now.
        refused = [
            fault for fault, server in zip(faults, servers, strict=True) if fault and not isinstance(server.state, Away)
        ]
        if refused or not any(server.version == version for server in servers):
            states = [
                f"{server.url} " + ("is left out" if server.version is None else f"serves version {server.version}")
                for server in servers
            ]
            raise RuntimeError(
                f"version {version} did not reach every server: {'; '.join(filter(None, faults))}. Now {', '.join(states)}"
            )

    def _require_folder(self) -> Path:
        if self._folder is None:
            raise ValueError("folder = None: adapters are sent by files; name a directory that the servers can read")
        return self._folder

    def _require_transport(self) -> Transport:
        if self._transport is None:
            raise ValueError("folder = None and carrier = None: pass one of them to send weights")
        return self._transport


class Completeness:
    """Names of the weights of a model.

    Args:
        model: directory or hub name of the model; ``None`` if unknown. Nothing is checked then.
    """

    def __init__(self, model: str | None) -> None:
        self._model = model
        self._replica: Replica | None = None

    def check(self, folder: Path, *, fully: bool) -> None:
        """Raise if a directory lacks a weight.

        Args:
            folder: the directory.
            fully: also look at a directory with names or shapes that the model does not have, but for a quantised model, which has others on
                disk. False leaves it to the server, which says what does not fit.

        Raises:
            ValueError: it does; names the first one, and the first tensor that does not fit.
        """
        if self._model is None or not folder.is_dir():
            return
        if self._replica is None:
            self._config = read_config(self._model)
            with torch.device("meta"):
                model = model_factory(self._config).from_config(self._config)
            self._replica = Replica(model)
        fully = fully and getattr(self._config, "quantization_config", None) is None
        known, found, misfit = set(self._replica), set[str](), ""
        with TensorFiles.of_model(folder) as files:
            for name in files:
                try:
                    found.add(self._replica.resolve(name, files.shape(name)))
                except ValueError:
                    if not fully:
                        return
                    misfit = misfit or f", and the model has no {name!r} of shape {list(files.shape(name))}"
        missing = sorted(known - found)
        if missing:
            raise ValueError(
                f"{folder} lacks {missing[0]!r} and {len(missing) - 1} others{misfit}: servers would keep their old values; send all tensors"
            )
