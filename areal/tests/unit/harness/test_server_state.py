"""A reset of the test server ends the requests of an earlier test, so that their tokens are not counted in the next one."""

from __future__ import annotations

import threading

from areal.tests.grid.models import model_dir
from areal.tests.harness.limits import wait_until
from areal.tests.harness.servers.generation import Drawing, Drawn
from areal.tests.harness.servers.server_state import State


def test_reset_ends_running_requests() -> None:
    state, answers = State(model_dir("qwen3")), list[Drawn]()
    state.step_seconds = 0.01
    asked = Drawing(name="a", prompt=[1, 2], length=1000, temperature=1.0, stop=[], seed=0, by_position=True)
    thread = threading.Thread(target=lambda: answers.append(state.draw(asked)))
    thread.start()
    wait_until(lambda: state.drawn > 1)
    state.reset()
    thread.join(10)
    assert [answer.finish for answer in answers] == ["abort"]
    assert state.drawn == 0
