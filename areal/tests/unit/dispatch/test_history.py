"""Prediction of uses from those that were: the cycle of a trainer, and its changes."""

from __future__ import annotations

from areal.dispatch.shared_devices import Need, Use
from areal.dispatch.shared_devices.turns import History


def test_uses_of_a_cycle_are_predicted_from_its_second_round() -> None:
    cycle = [Need("rollout", Use.GENERATE), Need("a", Use.FORWARD), Need("a", Use.STEP), Need("b", Use.STEP)]
    cycle += [*cycle[2:4], Need("a", Use.SYNC)]
    history, right = History(), 0
    for number, need in enumerate(cycle * 4):
        expected = (cycle * 8)[number + 1 : number + 17]
        predicted = history.following(need)
        if number < 2:
            assert predicted == []
        if number >= len(cycle) + 2:
            assert predicted == expected
            right += 1
        # Several answers are one use.
        for _ in range(3):
            history.add(need)
    assert right == 3 * len(cycle) - 2


def test_prediction_follows_a_change_of_the_cycle() -> None:
    a, b, c = (Need(name, Use.FORWARD) for name in "abc")
    history = History()
    for need in [a, b] * 5 + [a, c] * 3:
        history.add(need)
    assert history.following(a)[:4] == [c, a, c, a]
    history.forget("c")
    assert c not in history.following(a)
