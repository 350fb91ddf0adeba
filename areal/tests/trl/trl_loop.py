"""TRL's own rollout loop with another source of answers, and stand-ins for what its asynchronous trainer needs a GPU for."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import queue
import threading
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from trl.experimental.async_grpo import async_grpo_trainer, packing
from trl.experimental.async_grpo.async_rollout_worker import RolloutGroup, RolloutSample, _AsyncRolloutLoop

from areal.api import NamedTensor
from areal.inference.protocol import Sampling
from areal.utils.seeding import mixed

_EPISODE: contextvars.ContextVar[tuple[int, int]] = contextvars.ContextVar("episode")


def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace TRL's attention kernel by torch's, and its question for the speed of the GPU."""
    monkeypatch.setattr(packing, "_flash_attn", lambda: SimpleNamespace(flash_attn_varlen_func=_attention))
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, key_starts: Tensor, *_: Any, softmax_scale: float, **__: Any
) -> Tensor:
    """Causal attention of each segment over its path, whose last keys are those of the segment."""
    outputs = []
    for (a, b), (c, d) in zip(_pairs(starts), _pairs(key_starts), strict=True):
        visible = torch.ones(b - a, d - c, dtype=torch.bool).tril(d - c - (b - a))
        heads = (q[a:b].transpose(0, 1), k[c:d].transpose(0, 1), v[c:d].transpose(0, 1))
        output = scaled_dot_product_attention(*heads, attn_mask=visible, scale=softmax_scale, enable_gqa=True)
        outputs.append(output.transpose(0, 1))
    return torch.cat(outputs)


def _pairs(starts: Tensor) -> list[tuple[int, int]]:
    return list(itertools.pairwise(starts.tolist()))


class _Loop(_AsyncRolloutLoop):
    """Loop that waits for the version of each group, and generates with a rollout engine in place of a server."""

    worker: TRLWorker

    async def _generate_one(self, *args: Any, group_id: int = 0, **options: Any) -> Any:
        _EPISODE.set((group_id, self.worker.begun[group_id]))
        self.worker.begun[group_id] += 1
        while group_id >= self.worker.allowed:
            await asyncio.sleep(0.005)
        if self.worker.ended:
            raise asyncio.CancelledError
        self.worker.versions[group_id] = self.worker.version
        return await super()._generate_one(*args, group_id=group_id, **options)

    async def _generate_one_turn(self, prompt_ids: list[int]) -> tuple[list[int], list[float]]:
        seed = mixed(self.worker.seed, *_EPISODE.get(), 0)
        answer = await self.worker.rollout.generate(prompt_ids, Sampling(self.max_tokens, self.temperature, seed=seed))
        return list(answer.tokens), list(answer.logprobs)

    async def _score_group(self, group: RolloutGroup) -> list[RolloutSample]:
        # TRL notes the version when it schedules a group, here before the group may begin.
        group.model_version = self.worker.versions[group.group_id]
        return await super()._score_group(group)


class TRLWorker:
    """TRL's own loop in a thread, in step with the trainer: all groups that may begin end before an update."""

    def __init__(self, rollout: Any, items: Any, args: Any, tokens: Any, reward_funcs: list[Any]) -> None:
        self.rollout, self.seed, self._ahead = rollout, args.seed, args.max_staleness + 1
        self._samples = args.per_device_train_batch_size * args.gradient_accumulation_steps
        self._size = args.num_generations
        self._groups = self._samples // self._size
        self._waiting: dict[int, list[Any]] = {}
        self._passed = 0  # groups in the buffer
        self.begun: Counter[int] = Counter()
        self.versions: dict[int, int] = {}
        self.version = self.allowed = self._put = 0
        self.ended = False
        self.metrics_queue: queue.Queue[Any] = queue.Queue()
        self.rollout_buffer = self
        self._buffer: queue.Queue[Any] = queue.Queue()
        _Loop.worker = self
        self._loop = _Loop(
            model_name="tiny",
            dataset=items,
            reward_funcs=reward_funcs,
            processing_class=tokens,
            eos_token_ids=[tokens.eos_token_id],
            rollout_buffer=self,
            model_version_value=SimpleNamespace(value=0),
            heartbeat_value=SimpleNamespace(value=0.0),
            failed_event=threading.Event(),
            exception_info_queue=queue.Queue(),
            metrics_queue=self.metrics_queue,
            num_generations=args.num_generations,
            max_inflight_tasks=self._ahead * self._samples,
            max_tokens=args.max_completion_length,
            temperature=args.temperature,
        )
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run()

    # ---- the queue

    def put_nowait(self, sample: Any) -> None:
        # Groups end in any order; the steps of both runs train on the same ones.
        self._waiting.setdefault(sample.group_id, []).append(sample)
        self._put += 1
        while len(self._waiting.get(self._passed, ())) == self._size:
            for each in self._waiting.pop(self._passed):
                self._buffer.put(each)
            self._passed += 1

    def get(self, timeout: float) -> Any:
        return self._buffer.get(timeout=timeout)

    def qsize(self) -> int:
        return self._buffer.qsize()

    # ---- TRL's protocols

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._loop._loop.call_soon_threadsafe(self._loop._stop_event.set)
        self.allowed, self.ended = 10**9, True  # those that wait return
        self._thread.join(timeout=30)

    def update_model_version(self, version: int) -> None:
        self.version, self.allowed = version, (version - 1 + self._ahead) * self._groups

    def check_health(self, stale_after_s: float) -> None:
        assert not self._loop._failed_event.is_set()

    def pause(self) -> None:
        while self._thread.is_alive() and self._put < self.allowed * self._samples // self._groups:
            time.sleep(0.005)

    def send_weights(self, iterator: Any) -> None:
        self.rollout.update((NamedTensor(*each) for each in iterator), self.version + 1)

    def init_weight_transfer(self) -> None: ...

    resume = destroy = init_weight_transfer
