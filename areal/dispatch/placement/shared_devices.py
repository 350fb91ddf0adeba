"""Engines and rollouts that take turns on devices."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from areal.api import EngineMemory, KindMemory, TrainEngine
from areal.dispatch.placement.placement import Placement
from areal.dispatch.placement.uses import CREATED, Action, Kind, Move, Need, Part, Use

logger = logging.getLogger(__name__)


class Sleeper(Protocol):
    """A rollout that can free its device memory."""

    @property
    def asleep(self) -> bool:
        """True if the memory is free."""
        ...

    def sleep(self) -> None:
        """Free the memory. Nothing is lost but the cache of keys and values."""
        ...

    def wake(self) -> None:
        """Take the memory back."""
        ...


@dataclass(frozen=True)
class _Shared:
    """An engine, and the device of each of its ranks."""

    engine: TrainEngine
    devices: tuple[str, ...]


class SharedDevices:
    """Moves engines and rollouts to their devices before each use, and others away where room is missing.

    Args:
        budgets: bytes of each device for the state of engines and rollouts. Leave room for activations.

    Attributes:
        placement: decides on the moves.
    """

    def __init__(self, budgets: Mapping[str, int]) -> None:
        self.placement = Placement(budgets)
        self._devices = tuple(budgets)
        self._engines: dict[str, _Shared] = {}
        self._rollouts: dict[str, Sleeper] = {}
        # Parts that a use has allocated. Their bytes are measured: some parameters never get a gradient.
        self._settled: set[Part] = set()

    def add(self, name: str, engine: TrainEngine, devices: Sequence[str] | None = None) -> None:
        """Add an initialized engine or group. It is offloaded at once if it does not fit next to the others.

        Args:
            name: name of the model.
            engine: engine, or a group of ranks.
            devices: device of each rank; by default the only one.

        Raises:
            ValueError: the number of devices differs from that of the ranks, or see :meth:`Placement.add_model`.
        """
        reports = engine.memory()
        if devices is None and len(self._devices) == 1:
            devices = self._devices * len(reports)
        if devices is None or len(devices) != len(reports):
            raise ValueError(
                f"devices = {devices}: {name!r} has {len(reports)} ranks, name the device of each, of {', '.join(self._devices)}"
            )
        shared = _Shared(engine, tuple(devices))
        on_device = _by_device(shared.devices, [report.on_device for report in reports])
        if any(nbytes > self.placement.free(device) for device, nbytes in on_device.items()):
            engine.offload()
            reports = engine.memory()
        kinds = _measured(shared.devices, reports)
        self.placement.add_model(
            name,
            weights=kinds[Kind.WEIGHTS].sizes,
            gradients=kinds[Kind.GRADIENTS].sizes,
            optimizer=kinds[Kind.OPTIMIZER].sizes,
            fixed=_by_device(shared.devices, [_fixed_bytes(report) for report in reports]),
            existing=[kind for kind, measured in kinds.items() if measured.existing],
            on_device=[kind for kind, measured in kinds.items() if measured.on_device],
            # Megatron's buffers exist before the first backward, and stay.
            gradients_end_with_step=not kinds[Kind.GRADIENTS].existing,
        )
        self._engines[name] = shared

    def add_rollout(self, name: str, rollout: Sleeper, nbytes: int | Mapping[str, int]) -> None:
        """Add a rollout. It is put to sleep at once if it is awake and does not fit next to the others.

        Args:
            name: name of the rollout.
            rollout: the rollout.
            nbytes: its bytes while awake: on each device, or on the only one.
        """
        sizes = dict(nbytes) if isinstance(nbytes, Mapping) else dict.fromkeys(self._devices, nbytes)
        fits = all(size <= self.placement.free(device) for device, size in sizes.items())
        if not rollout.asleep and not fits:
            rollout.sleep()
        self.placement.add_rollout(name, sizes, awake=not rollout.asleep)
        self._rollouts[name] = rollout

    @contextlib.contextmanager
    def use(self, name: str, use: Use, upcoming: Sequence[Need] = ()) -> Iterator[None]:
        """Context of a use: what it needs is on the device inside. Uses can be nested, such as a weight sync in a rollout that is awake.

        Args:
            name: name of the model or rollout.
            use: what is done inside.
            upcoming: uses that follow, as far as they are known.

        Raises:
            ValueError: see :meth:`Placement.request`.
        """
        need = Need(name, use)
        moves = self.placement.request(need, upcoming)
        try:
            self._execute(moves)
            yield
            self._settled |= {Part(name, kind) for kind in CREATED.get(use, ())}
        finally:
            self.placement.release(need)
            self._observe({name, *(move.part.owner for move in moves)})

    def _execute(self, moves: Sequence[Move]) -> None:
        # Moves of one engine in one direction are one call, which waits for the device once.
        for (owner, action), group in itertools.groupby(moves, key=lambda move: (move.part.owner, move.action)):
            kinds = {move.part.kind for move in group}
            selected = {
                "params": Kind.WEIGHTS in kinds,
                "grads": Kind.GRADIENTS in kinds,
                "optimizer": Kind.OPTIMIZER in kinds,
            }
            match action:
                case Action.OFFLOAD:
                    self._engines[owner].engine.offload(**selected)
                case Action.ONLOAD:
                    self._engines[owner].engine.onload(**selected)
                case Action.SLEEP:
                    self._rollouts[owner].sleep()
                case Action.WAKE:
                    self._rollouts[owner].wake()

    def _observe(self, names: set[str]) -> None:
        """Compare engines and rollouts with the plan, and correct it. They differ after an error, or after a verb of another use."""
        for name in sorted(names & self._rollouts.keys()):
            awake, part = not self._rollouts[name].asleep, Part(name, Kind.ROLLOUT)
            if self.placement.observe(part, self.placement.sizes(part), existing=True, on_device=awake):
                logger.warning("%s is %s, which was not planned", name, "awake" if awake else "asleep")
        for name in sorted(names & self._engines.keys()):
            shared = self._engines[name]
            for kind, measured in _measured(shared.devices, shared.engine.memory()).items():
                part = Part(name, kind)
                sizes = measured.allocated if part in self._settled and measured.existing else measured.sizes
                if self.placement.observe(part, sizes, existing=measured.existing, on_device=measured.on_device):
                    logger.warning("%s of %s: not where it was planned: %s", kind.value, name, measured)


@dataclass(frozen=True)
class _Measured:
    """One kind of state of an engine: its bytes on each device, also those that are not allocated yet, and where it is."""

    sizes: dict[str, int]
    allocated: dict[str, int]
    existing: bool
    on_device: bool


def _measured(devices: Sequence[str], reports: Sequence[EngineMemory]) -> dict[Kind, _Measured]:
    kinds = {
        Kind.WEIGHTS: [report.params for report in reports],
        Kind.GRADIENTS: [report.grads for report in reports],
        Kind.OPTIMIZER: [report.optimizer for report in reports],
    }
    return {kind: _measured_kind(devices, of_ranks) for kind, of_ranks in kinds.items()}


def _measured_kind(devices: Sequence[str], ranks: Sequence[KindMemory]) -> _Measured:
    # Tensors of adapters stay on the device: they are not part of what moves.
    sizes = _by_device(devices, [rank.total - rank.fixed for rank in ranks])
    allocated = _by_device(devices, [rank.total - max(rank.fixed, rank.missing) for rank in ranks])
    moved = any(rank.offloaded for rank in ranks)
    present = any(rank.on_device + rank.missing > rank.fixed for rank in ranks) and any(
        rank.on_device for rank in ranks
    )
    return _Measured(sizes, allocated, existing=moved or present, on_device=present)


def _by_device(devices: Sequence[str], nbytes: Sequence[int]) -> dict[str, int]:
    """Return the sum of the ranks' bytes on each device."""
    return {device: sum(n for d, n in zip(devices, nbytes, strict=True) if d == device) for device in devices}


def _fixed_bytes(report: EngineMemory) -> int:
    return report.params.fixed + report.grads.fixed + report.optimizer.fixed
