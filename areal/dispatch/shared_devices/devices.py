"""Engines and rollouts that take turns on devices."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from areal.api import EngineMemory, KindMemory, TrainEngine
from areal.dispatch.errors import WorkerLostError
from areal.dispatch.shared_devices.place import Place
from areal.dispatch.shared_devices.placement import Placement
from areal.dispatch.shared_devices.shared_rollout import SharedRollout, Sleeper
from areal.dispatch.shared_devices.turns import Turn, Turns
from areal.dispatch.shared_devices.uses import CREATED, OPEN, Kind, Move, Need, Part, Use

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Shared:
    """An engine, and the device of each of its ranks."""

    engine: TrainEngine
    devices: tuple[str, ...]


class SharedDevices:
    """Moves engines and rollouts to their devices before each use, and others away where room is missing.

    A :class:`~areal.dispatch.WorkerGroup` that was added begins the use of each verb itself. For an engine, :meth:`use` is called. Methods
    may be called by several threads: a use that does not fit next to those of other threads waits until these end.

    Args:
        budgets: bytes of each device for the state of engines and rollouts. Leave room for activations.

    Attributes:
        placement: decides on the moves.
    """

    def __init__(self, budgets: Mapping[str, int]) -> None:
        self.placement = Placement(budgets)
        self._turns = Turns(self.placement, self._move, self._observe)
        self._engines: dict[str, _Shared] = {}
        self._rollouts: dict[str, Sleeper] = {}
        # Parts that a use has allocated. Their bytes are measured: some parameters never get a gradient.
        self._settled: set[Part] = set()

    # ---- what shares the devices

    def add(self, name: str, engine: TrainEngine, devices: Sequence[str] | None = None) -> None:
        """Add an initialized engine or group. It is offloaded at once if it does not fit next to the others.

        Args:
            name: name of the model.
            engine: engine, or a group of ranks.
            devices: device of each rank; by default the only one.

        Raises:
            ValueError: the engine or the name was added before, the number of devices differs from that of the ranks, or see
                :meth:`Placement.add_model`.
        """
        self._check_new(name, engine, [shared.engine for shared in self._engines.values()])
        reports = engine.memory()
        if devices is None and len(self.placement.devices) == 1:
            devices = self.placement.devices * len(reports)
        if devices is None or len(devices) != len(reports):
            raise ValueError(
                f"devices = {devices}: {name!r} has {len(reports)} ranks, name the device of each, of {', '.join(self.placement.devices)}"
            )
        self.placement.check_devices(name, devices)
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
            fixed=_fixed(shared.devices, reports),
            existing=[kind for kind, measured in kinds.items() if measured.existing],
            on_device=[kind for kind, measured in kinds.items() if measured.on_device],
            # Megatron's buffers exist before the first backward, and stay.
            gradients_end_with_step=not kinds[Kind.GRADIENTS].existing,
        )
        self._engines[name] = shared
        _share_devices(engine, Place(self._turns, name, self.remove))

    def add_rollout(self, name: str, rollout: Sleeper, nbytes: int | Mapping[str, int] | None = None) -> SharedRollout:
        """Add a rollout. It is put to sleep at once if it is awake and does not fit next to the others.

        Args:
            name: name of the rollout.
            rollout: the rollout.
            nbytes: its bytes while awake: on each device, or on the only one. Defaults to its ``awake_bytes``, which a rollout in this process
                has.

        Returns:
            The rollout to generate with and to send weights to: it is awake then.

        Raises:
            ValueError: the rollout or the name was added before, ``nbytes`` is missing or invalid, or the rollout cannot sleep.
        """
        self._check_new(name, rollout, self._rollouts.values())
        if not all(hasattr(rollout, member) for member in ("asleep", "sleep", "wake")):
            raise ValueError(f"{name!r} is a {type(rollout).__name__}, which has no asleep, sleep() and wake()")
        nbytes = getattr(rollout, "awake_bytes", None) if nbytes is None else nbytes
        if nbytes is None:
            raise ValueError(
                f"nbytes = None: {name!r} is a {type(rollout).__name__}, which does not report its memory: pass its bytes while awake"
            )
        sizes = dict(nbytes) if isinstance(nbytes, Mapping) else dict.fromkeys(self.placement.devices, nbytes)
        self.placement.check_devices(name, sizes)
        if not all(isinstance(size, int) and size >= 0 for size in sizes.values()) or not any(sizes.values()):
            raise ValueError(
                f"nbytes = {nbytes}: {name!r} has 0 or more bytes on each device while awake, and some on one"
            )
        fits = all(size <= self.placement.free(device) for device, size in sizes.items())
        if not rollout.asleep and not fits:
            rollout.sleep()
        self.placement.add_rollout(name, sizes, awake=not rollout.asleep)
        self._rollouts[name] = rollout
        return SharedRollout(rollout, Place(self._turns, name, self.remove))

    def remove(self, name: str) -> None:
        """Remove an engine or a rollout whose memory is free, such as one that was destroyed or closed. Its uses end."""
        self._turns.remove(name)
        self._rollouts.pop(name, None)
        shared = self._engines.pop(name, None)
        if shared is not None:
            _share_devices(shared.engine, None)
        self._settled -= {Part(name, kind) for kind in Kind}

    # ---- uses

    @contextlib.contextmanager
    def use(self, name: str, use: Use) -> Iterator[None]:
        """Context of a use: what it needs is on the device inside. Uses can be nested, such as a weight sync in a rollout that is awake.

        Args:
            name: name of the model or rollout.
            use: what is done inside.

        Raises:
            ValueError: see :meth:`Placement.request`.
        """
        turn = Turn(self._turns, Need(name, use))
        try:
            self._turns.begin(turn)
            yield
        finally:
            turn.end()
            self.settle()

    def settle(self, names: Sequence[str] = ()) -> None:
        """Measure the engines and rollouts whose uses have ended, and those in ``names``, and correct the placement.

        A use that begins does this, too.
        """
        self._turns.settle(names)

    # ---- moves and measurements, by one thread at a time

    def _check_new(self, name: str, added: object, others: Iterable[object]) -> None:
        """Raise if a name is none or is taken, or if something was added before. Measures the others, next to which it must fit."""
        if not isinstance(name, str) or not name:
            raise ValueError(f"name = {name!r}: give each engine and rollout a name of its own")
        if name in self.placement:
            raise ValueError(f"{name!r} is taken: give each model and rollout a name of its own")
        self.settle()
        if any(added is other for other in others):
            raise ValueError(f"{name!r} was added before under another name: add each engine and rollout once")

    def _move(self, moves: Sequence[Move]) -> None:
        # Moves of one engine in one direction are one call, which waits for the device once.
        for (owner, to_device), group in itertools.groupby(moves, key=lambda move: (move.part.owner, move.to_device)):
            kinds = {move.part.kind for move in group}
            if owner in self._rollouts:
                rollout = self._rollouts[owner]
                (rollout.wake if to_device else rollout.sleep)()
                continue
            selected = {
                "params": Kind.WEIGHTS in kinds,
                "grads": Kind.GRADIENTS in kinds,
                "optimizer": Kind.OPTIMIZER in kinds,
            }
            if to_device:
                self._engines[owner].engine.onload(**selected)
            else:
                self._offload(owner, selected)

    def _offload(self, name: str, selected: Mapping[str, bool]) -> None:
        try:
            self._engines[name].engine.offload(**selected)
        except WorkerLostError:
            raise
        except RuntimeError:
            # The memory of processes that were lost before is free.
            if not self._is_lost(name):
                raise

    def _is_lost(self, name: str) -> bool:
        """Return whether an engine holds nothing any more."""
        try:
            self._engines[name].engine.memory()
        except RuntimeError:
            return True
        return False

    def _observe(self, ended: Mapping[str, Collection[Use]]) -> list[str]:
        """Compare engines and rollouts with the plan, and correct it. They differ after an error, or after a verb of another use.

        Args:
            ended: uses that have ended, by name.

        Returns:
            The names of engines that are lost. Their next call raises; others go on.
        """
        lost: list[str] = []
        for name in sorted(ended.keys() & self._rollouts.keys()):
            awake, part = not self._rollouts[name].asleep, Part(name, Kind.ROLLOUT)
            differs = self.placement.observe(part, self.placement.sizes(part), existing=True, on_device=awake)
            if differs and not OPEN & set(ended[name]):
                logger.warning("%s is %s, which was not planned", name, "awake" if awake else "asleep")
        for name in sorted(ended.keys() & self._engines.keys()):
            self._settled |= {Part(name, kind) for use in ended[name] for kind in CREATED.get(use, ())}
            shared = self._engines[name]
            try:
                reports = shared.engine.memory()
            except RuntimeError:
                lost.append(name)
                self.placement.forget(name)
                continue
            self.placement.observe_fixed(name, _fixed(shared.devices, reports))
            for kind, measured in _measured(shared.devices, reports).items():
                part = Part(name, kind)
                sizes = measured.allocated if part in self._settled and measured.existing else measured.sizes
                differs = self.placement.observe(part, sizes, existing=measured.existing, on_device=measured.on_device)
                if differs and not OPEN & set(ended[name]):
                    logger.warning("%s of %s: not where it was planned: %s", kind.value, name, measured)
        return lost


def _share_devices(engine: TrainEngine, place: Place | None) -> None:
    """Let a group begin its uses itself. An engine does not."""
    getattr(engine, "share_devices", lambda _: None)(place)


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


def _fixed(devices: Sequence[str], reports: Sequence[EngineMemory]) -> dict[str, int]:
    """Return the bytes on each device that cannot be moved."""
    return _by_device(
        devices, [report.params.fixed + report.grads.fixed + report.optimizer.fixed for report in reports]
    )
