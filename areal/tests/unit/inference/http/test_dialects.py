"""Dialects of users: how much they must implement, and what they may leave out."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from areal.dispatch.shared_devices import Kind, Part, SharedDevices
from areal.inference.http import VLLM, Dialect, HTTPRollout, SGLang
from areal.inference.http.group import GlooCarrier, IPCCarrier
from areal.inference.http.servers.dialect import Ask, Routes, ServedModel
from areal.inference.http.servers.vllm import VLLMRoutes
from areal.inference.protocol import Sampling
from areal.tests.grid.models import model_dir
from areal.tests.harness.servers.rollout_http import PROMPT, Process, run, weights
from areal.tests.unit.inference.local.rollouts import endless


class BareRoutes(VLLMRoutes):
    """Without the capabilities that are optional."""

    sleeps = None

    def __init__(self) -> None:
        super().__init__(None, None, ServedModel(), labels=False)


class Bare:
    adapter = group = None

    def check(self, sampling: Sampling) -> None:
        return None

    async def examine(self, ask: Ask) -> Routes:
        return BareRoutes()


def test_dialect_implements_at_most_twelve_members() -> None:
    members = [name for kind in (Dialect, Routes) for name in vars(kind) if not name.startswith("_")]
    assert len(members) <= 12, members
    assert {"labels", "sleeps", "group"} <= set(members)
    assert all(hasattr(VLLM(), name) for name in vars(Dialect) if not name.startswith("_"))


class SecondRank:
    """Control plane of a rank beside the first, on which nothing fails."""

    rank, size = 1, 2

    def attempt(self, function: Any, note: str = "") -> Any:
        return function()

    def gather(self, value: Any) -> list[Any]:
        return [value] * self.size

    def attempt_and_gather(self, function: Any, note: str = "") -> list[Any]:
        return self.gather(function())

    def settle(self, error: BaseException | None, note: str = "") -> None:
        assert error is None


def test_rank_without_servers_sleeps_on_shared_devices(tmp_path: Path) -> None:
    with HTTPRollout("http://127.0.0.1:9", VLLM(), folder=tmp_path, control=SecondRank()) as rollout:
        shared = SharedDevices({"gpu": 100})
        shared.placement.add_model(
            "policy",
            weights={"gpu": 80},
            gradients={"gpu": 0},
            optimizer={"gpu": 0},
            existing=(Kind.WEIGHTS,),
            on_device=(Kind.WEIGHTS,),
        )
        # It does not fit beside the weights, on any rank.
        shared.add_rollout("rollout", rollout, 60)
        assert rollout.asleep
        assert not shared.placement.is_on_device(Part("rollout", Kind.ROLLOUT))


def test_labels_sleep_and_groups_are_optional(sglang: Process, tmp_path: Path) -> None:
    with HTTPRollout(sglang.url, Bare(), folder=tmp_path, model=model_dir("qwen3")) as rollout:
        rollout.update(weights(1), 3)
        assert run(rollout.generate(PROMPT, endless(4)))[0].versions == (3,) * 4
        with pytest.raises(RuntimeError, match=f"{sglang.url}: servers of this kind cannot sleep"):
            rollout.sleep()
        assert len(run(rollout.generate(PROMPT, endless(4)))[0].tokens) == 4
    threads = threading.active_count()
    with pytest.raises(
        ValueError, match=r"carrier = .*: servers of this kind get weights by files only: leave it None"
    ):
        HTTPRollout(sglang.url, Bare(), carrier=GlooCarrier())
    with pytest.raises(ValueError, match=r"carrier = .*: servers of this kind take no handles of memory: pass another"):
        HTTPRollout(sglang.url, SGLang(), carrier=IPCCarrier())
    assert threading.active_count() == threads
