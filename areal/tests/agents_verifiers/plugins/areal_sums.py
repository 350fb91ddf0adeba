"""Taskset of the tests: sums of three numbers, in two calls of a tool."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

SUMS = ((2, 3, 4), (4, 5, 1), (1, 7, 2))


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def calls(self, trace: vf.Trace) -> float:
        return float(len(trace.tool_messages))


class CalculatorConfig(vf.SharedToolsetConfig):
    pass


class Calculator(vf.Toolset[CalculatorConfig]):
    TOOL_PREFIX = None

    @vf.tool
    async def add(self, expression: str) -> str:
        """Add numbers."""
        return str(sum(int(each) for each in expression.split("+")))


class SumsConfig(vf.TasksetConfig):
    tools: bool = True


class Sums(vf.Taskset[SumTask, SumsConfig]):
    @classmethod
    def toolsets(cls, config: SumsConfig) -> list[vf.Toolset]:
        return [Calculator(CalculatorConfig())] if config.tools else []

    def load(self) -> Iterator[SumTask]:
        for a, b, c in SUMS:
            data = SumData(prompt=f"Add {a}, {b} and {c}.", answer=f"It is {a + b + c}.")
            yield SumTask(data, self.config.task)


__all__ = ["Sums"]

if __name__ == "__main__":
    Calculator.run()
