"""State machine that decides which state is on shared devices."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from areal.dispatch.shared_devices.eviction import Eviction, UsedParts
from areal.dispatch.shared_devices.uses import CREATED, NEEDED, Kind, Move, Need, Part, Use

_ALL = (Kind.WEIGHTS, Kind.GRADIENTS, Kind.OPTIMIZER)


class Placement:
    """Decides which models and rollouts are on devices that cannot hold all of them. Moves nothing itself.

    For each use, :meth:`request` returns the moves that make room. State that is on the device already is not moved. Offloads come before
    onloads, so that no budget is exceeded between two moves. By default, the least recently used state leaves. If later uses are announced,
    the state that is needed last leaves. In both cases, the bytes moved are at most 1.5 times those of the first rule.

    Args:
        budgets: bytes of each device for state that is placed here. Activations and other temporary memory come on top.

    Raises:
        ValueError: a budget is negative, or there is none.
    """

    def __init__(self, budgets: Mapping[str, int]) -> None:
        if not budgets or min(budgets.values()) < 0:
            raise ValueError(f"budgets = {dict(budgets)}: give at least one device, and 0 or more bytes for each")
        self._budgets = dict(budgets)
        self._state = Eviction(budgets)
        self._fixed: dict[str, dict[str, int]] = {}
        self._freed_by_step: set[Part] = set()
        self._active: list[Need] = []

    # ---- what is placed

    def add_model(
        self,
        name: str,
        *,
        weights: Mapping[str, int],
        gradients: Mapping[str, int],
        optimizer: Mapping[str, int],
        fixed: Mapping[str, int] | None = None,
        existing: Collection[Kind] = _ALL,
        on_device: Collection[Kind] = (),
        gradients_end_with_step: bool = True,
    ) -> None:
        """Add a model.

        Args:
            name: different for each model and rollout.
            weights, gradients, optimizer: bytes on each device, as soon as they exist.
            fixed: bytes on each device that cannot be moved.
            existing: kinds that are allocated. Gradients and optimizer state may come into being with a backward or a step.
            on_device: kinds that are on the device.
            gradients_end_with_step: a step frees the gradients. False if their memory stays.

        Raises:
            ValueError: the name is taken, a device is unknown, or what is on the device exceeds a budget.
        """
        sizes = {Kind.WEIGHTS: weights, Kind.GRADIENTS: gradients, Kind.OPTIMIZER: optimizer}
        self._check_new(name, [*sizes.values(), fixed or {}])
        self._reserve(name, fixed or {}, [sizes[kind] for kind in on_device])
        for kind, nbytes in sizes.items():
            self._state.set_part(Part(name, kind), nbytes, existing=kind in existing, on_device=kind in on_device)
        if gradients_end_with_step:
            self._freed_by_step.add(Part(name, Kind.GRADIENTS))

    def add_rollout(self, name: str, nbytes: Mapping[str, int], *, awake: bool = False) -> None:
        """Add a rollout.

        Args:
            name: different for each model and rollout.
            nbytes: bytes on each device while it is awake.
            awake: whether it is awake.

        Raises:
            ValueError: see :meth:`add_model`.
        """
        self._check_new(name, [nbytes])
        self._reserve(name, {}, [nbytes] if awake else [])
        self._state.set_part(Part(name, Kind.ROLLOUT), nbytes, existing=True, on_device=awake)

    def remove(self, name: str) -> None:
        """Remove a model or a rollout that is gone, with its uses."""
        self._active = [need for need in self._active if need.owner != name]
        for device, nbytes in self._fixed.pop(name).items():
            self._state.capacity[device] += nbytes
        for part in [part for part in self._state.sizes if part.owner == name]:
            self._freed_by_step.discard(part)
            self._state.remove(part)

    # ---- uses

    def blocked(self, need: Need, busy: Collection[str] = ()) -> bool:
        """Return whether a use does not fit now because of uses that have begun, and fits without these. Arguments as for :meth:`request`."""
        needed, pinned = self._request(need).needed, self._pinned(busy)
        return self._state.fits(needed) and not self._state.fits(needed | pinned)

    def ready(self, need: Need) -> bool:
        """Return whether a use needs no move."""
        needed = self._request(need).needed
        return self._state.fits(self._state.on_device) and needed & self._state.existing <= self._state.on_device

    def request(self, need: Need, upcoming: Sequence[Need] = (), busy: Collection[str] = ()) -> list[Move]:
        """Begin a use, and return the moves that it needs, in order. Uses that have begun keep what they need until :meth:`release`.

        Args:
            need: model or rollout, and its use.
            upcoming: uses that follow, as far as they are known.
            busy: names of models of which nothing leaves the device.

        Raises:
            ValueError: the use can never fit; names the device, the needed and the available bytes. Or it is not one of the owner.
        """
        request = self._request(need)
        pinned = self._pinned(busy)
        self._check_fits(need, request.needed, pinned)
        leaving, coming = self._state.plan(request, [self._request(each) for each in upcoming], pinned)
        self._active.append(need)
        # Parts without bytes, such as the optimizer of an engine without one, need no move.
        moves = [
            Move(part, to_device, self._state.nbytes([part]))
            for to_device, parts in ((False, leaving), (True, coming))
            for part in parts
        ]
        return [move for move in moves if move.nbytes]

    def release(self, need: Need) -> None:
        """End a use."""
        self._active.remove(need)
        self._state.finish(self._request(need))

    # ---- what is where

    def __contains__(self, name: object) -> bool:
        """Return whether there is a model or a rollout of this name."""
        return name in self._fixed

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of the devices."""
        return tuple(self._budgets)

    def is_on_device(self, part: Part) -> bool:
        """Return whether a part is on the device."""
        return part in self._state.on_device

    def sizes(self, part: Part) -> dict[str, int]:
        """Return the bytes of a part on each device."""
        return dict(self._state.sizes[part])

    def bytes_on_device(self, device: str, owner: str | None = None) -> int:
        """Return the bytes on a device: of all, or of one model or rollout."""
        owners = [owner] if owner is not None else list(self._fixed)
        parts = [part for part in self._state.on_device if part.owner in owners]
        return self._state.bytes_on(device, parts) + sum(self._fixed[name].get(device, 0) for name in owners)

    def free(self, device: str) -> int:
        """Return the bytes of a device that are not taken."""
        return self._budgets[device] - self.bytes_on_device(device)

    def observe(self, part: Part, sizes: Mapping[str, int], *, existing: bool, on_device: bool) -> bool:
        """Correct what is known of a part by what was measured. Returns whether it was somewhere else."""
        state = self._state
        before = part in state.existing, part in state.on_device
        state.set_part(part, sizes, existing=existing, on_device=on_device)
        # Parts without bytes are nowhere.
        return any(sizes.values()) and before != (existing, on_device)

    def forget(self, name: str) -> None:
        """Note that a model's processes hold nothing any more."""
        for part, sizes in list(self._state.sizes.items()):
            if part.owner == name:
                self._state.set_part(part, sizes, existing=False, on_device=False)

    def observe_fixed(self, name: str, nbytes: Mapping[str, int]) -> None:
        """Correct the bytes of a model that cannot be moved. Others leave with the next use, if it needs the room."""
        for device in self._budgets:
            self._state.capacity[device] += self._fixed[name].get(device, 0) - nbytes.get(device, 0)
        self._fixed[name] = dict(nbytes)

    @property
    def moved(self) -> int:
        """Bytes moved so far."""
        return self._state.moved

    def check_devices(self, name: str, devices: Iterable[str]) -> None:
        """Raise a ``ValueError`` if a device of a model or a rollout is without a budget."""
        unknown = set(devices) - set(self._budgets)
        if unknown:
            raise ValueError(
                f"{name!r} is on the device {min(unknown)!r}: the budgets are of {', '.join(self._budgets)}"
            )

    # ---- helpers

    def _check_new(self, name: str, sizes: Iterable[Mapping[str, int]]) -> None:
        if name in self._fixed:
            raise ValueError(f"{name!r} is taken: give each model and rollout a name of its own")
        self.check_devices(name, (device for nbytes in sizes for device in nbytes))

    def _reserve(self, added: str, fixed: Mapping[str, int], on_device: Iterable[Mapping[str, int]]) -> None:
        """Reserve the bytes that cannot be moved, and check that those on the device fit next to the others."""
        for device, budget in self._budgets.items():
            here = sum(nbytes.get(device, 0) for nbytes in (fixed, *on_device))
            if here > self.free(device):
                raise ValueError(
                    f"{added!r} would leave {self.free(device) - here:,} bytes on {device!r} (budget {budget:,} bytes): offload it or "
                    "the others before it is added, or raise the budget"
                )
        self._fixed[added] = dict(fixed)
        for device, nbytes in fixed.items():
            self._state.capacity[device] -= nbytes

    def _pinned(self, busy: Collection[str]) -> frozenset[Part]:
        """Return the parts that uses need which have begun, and all on the device of models that are busy."""
        needed = frozenset(part for active in self._active for part in self._request(active).needed)
        return needed | {part for part in self._state.on_device if part.owner in busy}

    def _request(self, need: Need) -> UsedParts:
        def parts(kinds: Iterable[Kind]) -> frozenset[Part]:
            return frozenset(Part(need.owner, kind) for kind in kinds)

        needed = parts(NEEDED[need.use])
        if not needed <= self._state.sizes.keys():
            known = sorted({part.owner for part in self._state.sizes})
            raise ValueError(
                f"{need.owner!r} has no use {need.use.value!r}: there are {', '.join(known) or 'none'}, and only rollouts generate"
            )
        freed = needed & self._freed_by_step if need.use is Use.STEP else frozenset()
        return UsedParts(needed, parts(CREATED.get(need.use, ())), freed)

    def _check_fits(self, need: Need, needed: frozenset[Part], pinned: frozenset[Part]) -> None:
        for device, capacity in self._state.capacity.items():
            others = self._state.bytes_on(device, pinned - needed)
            nbytes = self._state.bytes_on(device, needed)
            if nbytes + others > capacity:
                during = f", of which {others:,} are in use by others" if others else ""
                raise ValueError(
                    f"{need.owner!r} needs {nbytes:,} bytes on {device!r} for {need.use.value!r}, and {capacity:,} bytes are "
                    f"available{during}: raise the budget, or divide the model over more ranks"
                )
