"""A run whose harnesses wait in a tool for ever. A test kills it."""

from __future__ import annotations

from typing import Any

from areal.tests.agents_verifiers.pupil import Oracle, episode, play


class Waiting(Oracle):
    """Calls a command that does not end, and one in a session of its own."""

    def message(self, results: list[str], a: str, b: str, c: str) -> dict[str, Any]:
        call = super().message(results, a, b, c)["tool_calls"][0]
        call["function"]["arguments"] = {"command": "setsid sleep 3600 & sleep 3600"}
        return {"tool_calls": [call]}


if __name__ == "__main__":
    play(Waiting("bash"), episode("bash"), seconds=3600)
