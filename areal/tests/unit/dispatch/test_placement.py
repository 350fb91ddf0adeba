"""Placement: budgets hold between any two moves, every use is reached, and few bytes move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.dispatch.shared_devices import Kind, Move, Need, Part, Placement, Use

STATE = (Kind.WEIGHTS, Kind.GRADIENTS, Kind.OPTIMIZER)
# As the documentation has it, not as the code does.
NEEDS = {
    Use.FORWARD: "w",
    Use.EVAL: "w",
    Use.SYNC: "w",
    Use.FORWARD_BACKWARD: "wg",
    Use.STEP: "wgo",
    Use.CHECKPOINT: "wo",
    Use.GENERATE: "r",
    Use.ALL: "wgo",
    Use.ZERO_GRAD: "g",
    Use.CHANGE: "",
}
LETTERS = {"w": Kind.WEIGHTS, "g": Kind.GRADIENTS, "o": Kind.OPTIMIZER, "r": Kind.ROLLOUT}


@dataclass
class Scene:
    """Models, rollouts and budgets, and what is allocated and where."""

    budgets: dict[str, int]
    models: dict[str, dict[Kind, dict[str, int]]]
    rollouts: dict[str, dict[str, int]] = field(default_factory=dict)
    lazy: frozenset[str] = frozenset()
    """Models without optimizer state before the first step, whose gradients end with a step."""

    def sizes(self, part: Part) -> dict[str, int]:
        return self.rollouts[part.owner] if part.kind is Kind.ROLLOUT else self.models[part.owner][part.kind]

    def nbytes(self, parts: Any) -> int:
        return sum(sum(self.sizes(part).values()) for part in parts)

    def on(self, device: str, parts: Any) -> int:
        return sum(self.sizes(part).get(device, 0) for part in parts)

    def needed(self, need: Need) -> set[Part]:
        return {Part(need.owner, LETTERS[letter]) for letter in NEEDS[need.use]}

    def fits(self, parts: Any) -> bool:
        return all(self.on(device, parts) <= budget for device, budget in self.budgets.items())

    def parts(self) -> set[Part]:
        return {Part(m, kind) for m in self.models for kind in STATE} | {Part(r, Kind.ROLLOUT) for r in self.rollouts}

    def first(self) -> set[Part]:
        """Return the parts that are allocated at the beginning."""
        missing = {Part(m, kind) for m in self.lazy for kind in (Kind.GRADIENTS, Kind.OPTIMIZER)}
        return self.parts() - missing

    def placement(self) -> Placement:
        placement = Placement(self.budgets)
        for name, kinds in self.models.items():
            placement.add_model(
                name,
                weights=kinds[Kind.WEIGHTS],
                gradients=kinds[Kind.GRADIENTS],
                optimizer=kinds[Kind.OPTIMIZER],
                existing=[kind for kind in STATE if Part(name, kind) in self.first()],
                gradients_end_with_step=name in self.lazy,
            )
        for name, nbytes in self.rollouts.items():
            placement.add_rollout(name, nbytes)
        return placement

    def created(self, need: Need) -> set[Part]:
        kinds = {Use.FORWARD_BACKWARD: "g", Use.STEP: "go"}.get(need.use, "")
        return {Part(need.owner, LETTERS[letter]) for letter in kinds}

    def freed(self, need: Need) -> set[Part]:
        return {Part(need.owner, Kind.GRADIENTS)} if need.use is Use.STEP and need.owner in self.lazy else set()


class Devices:
    """Executes moves one by one and checks each."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.existing, self.here, self.moved = scene, scene.first(), set[Part](), 0

    def use(self, need: Need, moves: Sequence[Move]) -> None:
        scene = self.scene
        for move in moves:
            assert move.nbytes == scene.nbytes([move.part]) > 0
            assert move.part in self.existing
            if not move.to_device:
                assert move.part in self.here
                assert move.part not in scene.needed(need)
                self.here.remove(move.part)
            else:
                assert move.part not in self.here, "what is on the device is not moved"
                self.here.add(move.part)
            self.moved += move.nbytes
            assert scene.fits(self.here), "a budget is exceeded between two moves"
        assert {part for part in scene.needed(need) & self.existing if scene.nbytes([part])} <= self.here
        self.existing |= scene.created(need)
        self.here |= scene.created(need)
        assert scene.fits(self.here | scene.needed(need)), "a budget is exceeded by the use"
        self.existing -= scene.freed(need)
        self.here -= scene.freed(need)


def moved_by_lru(scene: Scene, uses: Sequence[Need]) -> int:
    """Return the bytes that move if parts leave in the order of their last use, until there is room."""
    existing, here, moved = scene.first(), set[Part](), 0
    last = dict.fromkeys(scene.parts(), -1)
    for now, need in enumerate(uses):
        needed = scene.needed(need)
        order = sorted(here - needed, key=lambda part: (last[part], "ogwr".index(part.kind.value[0]), part.owner))
        for part in order:
            full = {d for d, budget in scene.budgets.items() if scene.on(d, here | needed) > budget}
            if any(scene.on(device, [part]) for device in full):
                here.remove(part)
                moved += scene.nbytes([part])
        moved += scene.nbytes((needed & existing) - here)
        existing |= scene.created(need)
        here |= (needed & existing) | scene.created(need)
        existing -= scene.freed(need)
        here -= scene.freed(need)
        last.update(dict.fromkeys(needed, now))
    return moved


@st.composite
def scenes(draw: Callable[..., Any]) -> tuple[Scene, list[Need], int | None]:
    """Draw a scene, uses, and the number of uses that are announced."""
    devices = [f"gpu{i}" for i in range(draw(st.integers(1, 2)))]
    size = st.fixed_dictionaries({device: st.integers(0, 12) for device in devices})
    models = {f"model{i}": {kind: draw(size) for kind in STATE} for i in range(draw(st.integers(1, 4)))}
    rollouts = {f"rollout{i}": draw(size) for i in range(draw(st.integers(0, 2)))}
    budgets = {device: draw(st.integers(12, 60)) for device in devices}
    lazy = frozenset(draw(st.sets(st.sampled_from(sorted(models)))))
    need = st.builds(
        Need, st.sampled_from(sorted(models)), st.sampled_from([use for use in Use if use is not Use.GENERATE])
    )
    if rollouts:
        need |= st.builds(Need, st.sampled_from(sorted(rollouts)), st.just(Use.GENERATE))
    # Cycles are the worst case of the least-recently-used rule, and the usual case of a trainer.
    uses = draw(st.lists(need, max_size=12)) * draw(st.integers(1, 3))
    return Scene(budgets, models, rollouts, lazy), uses, draw(st.sampled_from([0, 1, 3, None]))


@settings(deadline=None, max_examples=60)
@given(scenes())
def test_budgets_hold_every_use_is_reached_and_few_bytes_move(drawn: tuple[Scene, list[Need], int | None]) -> None:
    scene, uses, announced = drawn
    placement, devices = scene.placement(), Devices(scene)
    for now, need in enumerate(uses):
        upcoming = uses[now + 1 :] if announced is None else uses[now + 1 : now + 1 + announced]
        if not scene.fits(scene.needed(need)):
            with pytest.raises(ValueError, match=f"'{need.owner}' needs"):
                placement.request(need, upcoming)
            continue
        devices.use(need, placement.request(need, upcoming))
        placement.release(need)
        on_device = {part for part in scene.parts() if placement.is_on_device(part) and scene.nbytes([part])}
        assert on_device == {part for part in devices.here if scene.nbytes([part])}
        assert all(placement.bytes_on_device(device) == scene.on(device, on_device) for device in scene.budgets)
    assert placement.moved == devices.moved
    reached = [need for need in uses if scene.fits(scene.needed(need))]
    assert devices.moved <= 1.5 * moved_by_lru(scene, reached)


# ---- examples


def model(weights: int, gradients: int = 0, optimizer: int = 0) -> dict[Kind, dict[str, int]]:
    sizes = zip(STATE, (weights, gradients, optimizer), strict=True)
    return {kind: {"gpu": nbytes} for kind, nbytes in sizes}


def moves_of(placement: Placement, owner: str, use: Use, upcoming: Sequence[Need] = ()) -> list[str]:
    """Return the moves of a use as text, and end it."""
    need = Need(owner, use)
    moves = placement.request(need, upcoming)
    placement.release(need)
    return [f"{'onload' if move.to_device else 'offload'} {move.part.owner} {move.part.kind.value}" for move in moves]


def test_ppo_moves_only_what_each_use_needs() -> None:
    scene = Scene(
        {"gpu": 60},
        {"policy": model(10, 10, 20), "reference": model(10), "critic": model(8, 8, 16)},
        {"rollout": {"gpu": 50}},
        lazy=frozenset({"policy", "critic"}),
    )
    placement = scene.placement()
    assert moves_of(placement, "rollout", Use.GENERATE) == ["onload rollout rollout"]
    assert moves_of(placement, "policy", Use.FORWARD) == ["onload policy weights"]
    assert moves_of(placement, "reference", Use.FORWARD) == ["offload rollout rollout", "onload reference weights"]
    assert moves_of(placement, "critic", Use.FORWARD) == ["onload critic weights"]
    # Gradients and optimizer state come into being on the device.
    assert moves_of(placement, "critic", Use.STEP) == []
    assert placement.bytes_on_device("gpu") == 44
    # The optimizer of one model leaves before that of another comes.
    assert moves_of(placement, "policy", Use.STEP) == ["offload critic optimizer"]
    assert moves_of(placement, "critic", Use.STEP) == ["offload policy optimizer", "onload critic optimizer"]
    assert moves_of(placement, "policy", Use.CHECKPOINT) == ["offload reference weights", "onload policy optimizer"]
    assert moves_of(placement, "policy", Use.SYNC) == []


def test_announced_uses_keep_what_comes_next() -> None:
    """Three models in turn, and room for two: without a look ahead, each is moved every time."""
    scene = Scene({"gpu": 20}, {name: model(10) for name in "abc"})
    uses = [Need(name, Use.FORWARD) for name in "abc" * 10]
    moved = {}
    for announced in (0, 12):
        placement = scene.placement()
        for now, need in enumerate(uses):
            placement.request(need, uses[now + 1 : now + 1 + announced])
            placement.release(need)
        moved[announced] = placement.moved
    assert moved[0] == moved_by_lru(scene, uses) == 10 * 30 + 10 * 28
    assert moved[12] < 0.6 * moved[0]


def test_small_part_that_makes_room_alone_leaves_alone() -> None:
    scene = Scene({"gpu": 12}, {"small": model(1), "large": model(10), "new": model(2)})
    placement = scene.placement()
    for name in ("small", "large"):
        moves_of(placement, name, Use.FORWARD)
    assert moves_of(placement, "new", Use.FORWARD) == ["offload small weights", "onload new weights"]
    moves_of(placement, "large", Use.FORWARD)
    # The large one makes room for both: what was used before it stays.
    placement = scene.placement()
    for name in ("small", "large"):
        moves_of(placement, name, Use.FORWARD)
    placement.add_model("huge", weights={"gpu": 11}, gradients={}, optimizer={})
    assert moves_of(placement, "huge", Use.FORWARD) == ["offload large weights", "onload huge weights"]


def test_each_device_has_its_own_budget() -> None:
    """The second device is full, the first is not: only a part of the second leaves."""
    left, right = {"gpu0": 5, "gpu1": 0}, {"gpu0": 0, "gpu1": 5}
    nothing = {kind: {"gpu0": 0, "gpu1": 0} for kind in STATE}
    sizes = {"left": left, "right": right, "both": {"gpu0": 5, "gpu1": 5}}
    scene = Scene({"gpu0": 20, "gpu1": 8}, {name: {**nothing, Kind.WEIGHTS: size} for name, size in sizes.items()})
    placement = scene.placement()
    for name in ("left", "right"):
        moves_of(placement, name, Use.FORWARD)
    assert moves_of(placement, "both", Use.FORWARD) == ["offload right weights", "onload both weights"]
    assert (placement.free("gpu0"), placement.free("gpu1")) == (10, 3)


def test_nested_uses_keep_what_they_need() -> None:
    scene = Scene({"gpu": 30}, {"policy": model(10), "critic": model(15)}, {"rollout": {"gpu": 15}})
    placement = scene.placement()
    asleep = Need("rollout", Use.GENERATE)
    placement.request(asleep)
    assert moves_of(placement, "policy", Use.SYNC) == ["onload policy weights"]
    assert moves_of(placement, "critic", Use.FORWARD) == ["offload policy weights", "onload critic weights"]
    placement.add_model("large", weights={"gpu": 16}, gradients={}, optimizer={})
    message = r"'large' needs 16 bytes on 'gpu' for 'forward', and 30 bytes are available, of which 15 are in use by others: raise the budget"
    with pytest.raises(ValueError, match=message):
        placement.request(Need("large", Use.FORWARD))
    placement.release(asleep)
    assert moves_of(placement, "large", Use.FORWARD)[-1] == "onload large weights"


def test_bytes_that_cannot_move_reduce_the_budget() -> None:
    placement = Placement({"gpu": 30})
    sizes = {"weights": {"gpu": 10}, "gradients": {}, "optimizer": {}}
    placement.add_model("policy", **sizes, fixed={"gpu": 5}, on_device=[Kind.WEIGHTS])
    assert (placement.bytes_on_device("gpu"), placement.free("gpu")) == (15, 15)
    placement.add_model("other", weights={"gpu": 26}, gradients={}, optimizer={})
    with pytest.raises(
        ValueError, match="'other' needs 26 bytes on 'gpu' for 'eval', and 25 bytes are available: raise"
    ):
        placement.request(Need("other", Use.EVAL))
    with pytest.raises(ValueError, match="'third' would leave -1 bytes on 'gpu' \\(budget 30 bytes\\)"):
        placement.add_model("third", **sizes, fixed={"gpu": 6}, on_device=[Kind.WEIGHTS])
    # Nothing was added.
    placement.add_model("third", **sizes)


def test_wrong_names_raise() -> None:
    placement = Placement({"gpu": 30})
    sizes = {"weights": {"gpu": 10}, "gradients": {}, "optimizer": {}}
    placement.add_model("policy", **sizes)
    with pytest.raises(ValueError, match="'policy' is taken"):
        placement.add_rollout("policy", {"gpu": 1})
    with pytest.raises(ValueError, match="'b' is on the device 'gpu7': the budgets are of gpu"):
        placement.add_rollout("b", {"gpu7": 1})
    with pytest.raises(ValueError, match="'policy' has no use 'generate': there are policy"):
        placement.request(Need("policy", Use.GENERATE))
    with pytest.raises(ValueError, match=r"budgets = \{\}: give at least one device"):
        Placement({})
