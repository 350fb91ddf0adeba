"""Dialects of users: how much they must implement, and what they may leave out."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

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
