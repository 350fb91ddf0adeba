"""Environment of the tests: a solver, and a judge that is not trained."""

from __future__ import annotations

import verifiers.v1 as vf


class PairConfig(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig()
    judge: vf.AgentConfig = vf.AgentConfig()


class PairEnv(vf.Env[PairConfig]):
    async def setup(self, agents: vf.Agents) -> None:
        agents.judge.trainable = False

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        await agents.solver.run(task)
        await agents.judge.run(task)


__all__ = ["PairEnv"]
