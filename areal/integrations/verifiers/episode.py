"""Episodes of environments of verifiers."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import verifiers
import verifiers.v1 as vf
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.configs.env import default_agent_harness
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

from areal.inference.gateway import Gateway
from areal.inference.gateway.session import Session
from areal.inference.protocol import RolloutClient
from areal.integrations.releases import warn_untested
from areal.integrations.verifiers.reaper import MARK, Reaper
from areal.trainer.rollout.sequence import Sequence

TESTED = ("0.4.0", "0.4.0")
"""Oldest and newest release of verifiers that the tests ran with."""

_NO_KEY = "AREAL_GATEWAY_HAS_NO_KEY"
"""Name of an environment variable that is not set. By default, verifiers sends the key of its cloud service."""


class VerifiersEpisode:
    """Episode of a taskset and a harness of verifiers, which ask a :class:`~areal.inference.gateway.Gateway`.

    Each agent of a run has a separate session, named by the id of its trace. All that is sampled in it becomes sequences with the reward of
    this trace. Agents that are not trainable are left out. Means are logged: ``requests`` and ``refused`` requests of a run, its
    ``sequences``, and each reward and metric of a trace by its name.

    There are two clients. verifiers' ``EvalClientConfig``, the default, passes a harness's messages on to the gateway, which renders them with
    the model's own template and goes on from the tokens that were sampled. ``TrainClientConfig`` renders messages by the package renderers, in
    this process, and sends tokens. Both train on exactly what was sampled. The default needs no second implementation of the template, and
    works for models that renderers does not know.

    Args:
        config: configuration of an environment: a mapping as in verifiers' files, or an ``EnvConfig``.
        gateway: serves while a runner has the episode.
        client: configuration of the client, without a ``base_url``.
        sampling: parameters that replace those of the harness. The gateway supplies what both leave out.
        max_requests: maximum number of answers of an agent in a run; ``None`` for no limit.

    Attributes:
        environment: verifiers' environment.

    Raises:
        ValueError: an option cannot be honoured.
    """

    def __init__(
        self,
        config: vf.EnvConfig | Mapping[str, Any],
        gateway: Gateway,
        *,
        client: vf.ClientConfig | None = None,
        sampling: vf.Sampling | None = None,
        max_requests: int | None = None,
    ) -> None:
        warn_untested("verifiers", verifiers.__version__, "areal.integrations.verifiers", TESTED)
        client = client or vf.EvalClientConfig()
        if client.base_url != type(client)().base_url:
            raise ValueError(f"client.base_url = {client.base_url!r}: the gateway's URL is used; leave it out")
        self._gateway, self._client, self._max_requests = gateway, client, max_requests
        self._sampling = sampling or vf.Sampling()
        self._mark = secrets.token_hex(16)
        self.environment = load_environment(_checked(config, self._mark))
        self._serving: asyncio.Task[None] | None = None
        self._leave = asyncio.Event()

    def tasks(self) -> list[vf.Task]:
        """Return all tasks of the taskset, as the items of a runner.

        Raises:
            ValueError: the taskset is infinite.
        """
        taskset = self.environment.taskset
        if not taskset.bounded:
            raise ValueError(
                f"taskset {type(taskset).__name__} is infinite: pass list(episode.environment.taskset.take(1000)) as items"
            )
        return list(taskset)

    async def __aenter__(self) -> VerifiersEpisode:
        self._leave.clear()
        opened = asyncio.get_running_loop().create_future()
        self._serving = asyncio.create_task(self._serve(opened))
        try:
            await asyncio.wait({opened, self._serving}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            # The environment is still starting: __aexit__ will not be called.
            self._serving.cancel()
            await asyncio.wait({self._serving})
            raise
        if self._serving.done():
            await self._serving
        return self

    async def __aexit__(self, *error: Any) -> None:
        self._leave.set()
        if self._serving is not None:
            await self._serving

    async def _serve(self, opened: asyncio.Future[None]) -> None:
        """Serve the environment until the episode is left. One task enters and leaves, as cancel scopes of anyio need it."""
        async with self._gateway, Reaper(self._mark), self.environment.serving():
            opened.set_result(None)
            await self._leave.wait()

    async def run(self, client: RolloutClient, item: vf.Task) -> list[Sequence]:
        """Run the environment once on a task.

        Raises:
            RuntimeError: the environment or one of its agents failed; has its error.
            ValueError: no request of a trainable agent was answered.
        """
        sessions: dict[str, Session] = {}
        endpoint = {"base_url": f"{self._gateway.root}/v1", "api_key_var": _NO_KEY}
        context = vf.ModelContext(
            model=self._gateway.models[0], client=self._client.model_copy(update=endpoint), sampling=self._sampling
        )
        with contextlib.ExitStack() as opened:

            def open_session(trace: vf.Trace) -> None:
                # Both clients send the id of the trace as X-Session-ID: one connection pool serves all runs.
                session = self._gateway.session(client, name=trace.id, max_requests=self._max_requests)
                sessions[trace.id] = opened.enter_context(session)

            slot = self.environment.slots(item)[0]
            episode = await self.environment.run_slot(slot, context, on_trace=open_session)
        if not self.environment.complete(episode):
            raise _failure(episode)
        # Traces of attempts that verifiers repeated are not in the episode.
        trained = [(trace, sessions[trace.id]) for trace in episode.traces if trace.ok and trace.agent.trainable]
        found = [sequence for trace, session in trained for sequence in _sequences(trace, session)]
        if not found:
            counts = {trace.agent.name: dict(sessions[trace.id].counts) for trace in episode.traces}
            raise ValueError(f"no trainable agent had an answer from the gateway; requests by agent: {counts}")
        return found


def _checked(config: vf.EnvConfig | Mapping[str, Any], mark: str) -> vf.EnvConfig:
    """Return the configuration with a mark in the environment variables of all harnesses, or raise a ``ValueError``."""
    resolved = resolve_env_config(config if isinstance(config, vf.EnvConfig) else deepcopy(dict(config)))
    agents = agent_config_fields(resolved)
    own = [name for name, agent in agents.items() if agent.client is not None]
    if agents and len(own) == len(agents):
        raise ValueError(f"{own[0]}.client: no agent would ask the policy; leave it out for the agents to train")
    marked = {}
    for name, agent in agents.items():
        harness = agent.harness or default_agent_harness(resolved.taskset.id)
        harness = harness.model_copy(update={"env": {**harness.env, MARK: mark}})
        marked[name] = agent.model_copy(update={"harness": harness})
    return resolved.model_copy(update=marked)


def _sequences(trace: vf.Trace, session: Session) -> list[Sequence]:
    """Return what was sampled in the session of a trace, with its reward."""
    sampled = session.sequences()
    named = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
    named |= {name: value for name, value in trace.metrics.items() if value is not None}
    stats = {**named, **session.stats(sampled)}
    return [
        Sequence(each.segments, trace.reward, truncated=each.truncated or trace.is_truncated, stats=dict(stats))
        for each in sampled
    ]


def _failure(episode: vf.Episode) -> RuntimeError:
    """Return the last error of an episode, with its traceback as a note."""
    errors = [error for trace in episode.traces for error in trace.errors] + episode.errors
    if not errors:
        return RuntimeError("the environment does not count this episode as complete, and recorded no error")
    failure = RuntimeError(f"{errors[-1].type}: {errors[-1].message}")
    if errors[-1].traceback:
        failure.add_note(errors[-1].traceback)
    return failure
