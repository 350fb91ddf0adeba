"""Rollouts for TRL's asynchronous GRPO."""

from __future__ import annotations

import contextlib
import inspect
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from trl.chat_template_utils import add_response_schema, parse_response
from trl.experimental.async_grpo import AsyncGRPOConfig
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from areal import inference
from areal.api.weights import NamedTensor
from areal.inference.protocol import Completion, Sampling
from areal.integrations.trl.checks import check
from areal.trainer.rollout import Episode, Plan, Runner, SingleTurn
from areal.trainer.rollout.plan import Group, Items

_UNSUPPORTED = (
    "min_p",
    "top_p",
    "top_k",
    "repetition_penalty",
    "max_tool_calling_iterations",
    "fork_threshold_tokens",
    "log_completions",
    "num_completions_to_print",
    "request_timeout",
    "weight_sync_timeout",
)


class RolloutWorker:
    """Rollout worker and weight transfer of ``AsyncGRPOTrainer``: pass it as ``rollout_worker`` and as ``weight_transfer``.

    A group starts at most ``max_staleness`` updates before the step that trains on it, so that TRL discards no sample. The version of a
    sample is that of its oldest token. A failed episode ends the run.

    The worker does not see a checkpoint that is passed to ``train()``, and starts with the first of ``items``.

    Args:
        rollout: rollout engine. It stays open at the end.
        items: data set, in the order of the run. For a run that resumes from a checkpoint, start with the first item not trained on.
        args: configuration of the trainer.
        tokenizer: tokenizer of the model.
        episode: returns one sequence; see :func:`rewarded_answer`.
        reproducible: finish running episodes before an update, so that equal seeds give equal runs.

    Raises:
        ValueError: an option of ``args`` is not supported.
    """

    def __init__(
        self,
        rollout: inference.LocalRollout | inference.HTTPRollout,
        items: Items,
        args: AsyncGRPOConfig,
        tokenizer: PreTrainedTokenizerBase,
        episode: Episode,
        reproducible: bool = False,
    ) -> None:
        # A batch of the plan is what TRL trains on between two updates.
        step = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        samples, size, ahead = step * args.weight_sync_steps, args.num_generations, args.max_staleness
        waiting, fixed = (ahead + 1) * samples, args.token_budget is not None and args.token_budget <= 0
        rules = {
            "token_budget": (fixed, "a step needs a fixed number of samples: set it to 0"),
            "max_staleness": (ahead >= 1, "TRL fetches one micro-batch ahead: set it to at least 1"),
            "num_generations": (samples % size == 0, f"it must divide the {samples} samples between two updates"),
            "queue_maxsize": (not 0 < args.queue_maxsize < waiting, f"{waiting} samples may wait: set it to {waiting}"),
            "resume_from_checkpoint": (
                args.resume_from_checkpoint is None,
                "the rollouts would begin with the first item again: leave it out, pass the rest of the items, "
                "and the checkpoint to train()",
            ),
        }
        check(args, _UNSUPPORTED, rules)
        running = args.max_inflight_tasks if args.max_inflight_tasks > 0 else waiting
        self._plan = Plan(samples // size, size, ahead, max_concurrent=running, seed=args.seed, shuffle=False)
        self._rollout, self._items, self._tokenizer, self._episode = rollout, items, tokenizer, episode
        self._reproducible, self._version, self._batches, self._heartbeat = reproducible, 0, 0, time.time()
        self._runner: Runner | None = None
        self._fault: Exception | None = None
        self.rollout_buffer: queue.Queue[RolloutSample] = queue.Queue()  # limited by the plan
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue()

    def start(self) -> None:
        """Start episodes, after the first update."""
        self._runner = Runner(self._rollout, self._episode, self._items, self._plan, rank=0, size=1)
        self.update_model_version(self._version)
        threading.Thread(target=self._pass_on, args=(self._runner,), name="trl-rollouts", daemon=True).start()

    def stop(self) -> None:
        """Cancel running episodes."""
        if self._runner is not None:
            self._runner.close()

    def update_model_version(self, model_version: int) -> None:
        """Let the groups of the next batch start. TRL's first version is 1."""
        self._version = model_version
        if self._runner is not None:
            self._runner.advance(model_version - 1)

    def check_health(self, stale_after_s: float) -> None:
        """Raise a ``RuntimeError`` if the worker's thread has failed or hangs."""
        if self._fault is not None or time.time() - self._heartbeat > stale_after_s:
            fault = self._fault or f"no sign of life for heartbeat_stale_after_s = {stale_after_s:g}"
            raise RuntimeError(f"the rollout worker has failed: {fault}") from self._fault

    def init_weight_transfer(self) -> None:
        """Do nothing: the rollout engine is connected."""

    def pause(self) -> None:
        """Wait for running episodes if the run is reproducible."""
        if self._reproducible and self._runner is not None:
            while self._fault is None and self._batches < self._version + self._plan.max_staleness:
                time.sleep(0.01)

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        """Load the trainer's weights into the rollout engine."""
        self._rollout.update((NamedTensor(*each) for each in iterator), self._version + 1)

    def resume(self) -> None:
        """Do nothing: the update has resumed requests."""

    def destroy(self) -> None:
        """Do nothing: the caller closes the rollout engine."""

    def _pass_on(self, runner: Runner) -> None:
        """Put samples into the buffer until the runner is closed."""
        try:
            while True:
                self._heartbeat = time.time()
                with contextlib.suppress(TimeoutError):
                    for sample in [sample for group in runner.next_batch(1.0) for sample in self._samples(group)]:
                        self.rollout_buffer.put(sample)
                    self._batches += 1
        except Exception as error:
            self._fault = error

    def _samples(self, group: Group) -> Iterator[RolloutSample]:
        """Yield a group as samples of TRL. Their arrays are token-aligned; log-probs of given tokens are zero."""
        if len(group.sequences) != self._plan.group_size or group.failed:
            raise RuntimeError(
                f"group {group.index}: {len(group.sequences)} sequences, {group.failed} failures; each must return one\n{group.traceback}"
            )
        rewards = np.array([sequence.reward for sequence in group.sequences])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-8)
        for sequence, advantage in zip(group.sequences, advantages.tolist(), strict=True):
            policy = [each for each in sequence.segments if each.trainable]
            ids = np.concatenate([np.asarray(each.tokens, np.int64) for each in sequence.segments])
            mask = np.concatenate([np.full(len(each.tokens), int(each.trainable)) for each in sequence.segments])
            logprobs = np.zeros(len(ids), np.float32)
            logprobs[mask == 1] = np.concatenate([each.values["rollout_logprobs"] for each in policy])
            versions = np.unique(np.concatenate([each.values["versions"] for each in policy]))
            metrics = {"reward": sequence.reward, "reward_std": rewards.std(), "sample/versions_mean": len(versions)}
            texts = [self._tokenizer.decode(ids[mask == trained], skip_special_tokens=True) for trained in (0, 1)]
            prompt, answer = [{"role": "user", "content": texts[0]}], [{"role": "assistant", "content": texts[1]}]
            metrics = {name: float(value) for name, value in (metrics | sequence.stats).items()}
            yield RolloutSample(
                prompt, answer, ids, mask, logprobs, advantage, int(versions[0]), group.index, metrics, time.time()
            )


def rewarded_answer(
    args: AsyncGRPOConfig, tokenizer: PreTrainedTokenizerBase, *functions: Callable[..., Any]
) -> SingleTurn:
    """Return an episode of one answer to ``prompt``, with TRL's reward functions: called in threads, with one completion at a time."""

    for function in functions:
        if inspect.iscoroutinefunction(function):
            raise ValueError(
                f"reward function {function.__name__} is a coroutine function: pass one that returns a list"
            )
    # Without a response template, the content is the text without special tokens.
    if getattr(tokenizer, "response_template", None) is None:
        with contextlib.suppress(ValueError):
            add_response_schema(tokenizer)

    def prompt(item: dict[str, Any]) -> Any:
        options = {"add_generation_prompt": True, "return_dict": False, **(args.chat_template_kwargs or {})}
        return tokenizer.apply_chat_template(item["prompt"], **options)

    def reward(item: dict[str, Any], completion: Completion) -> float:
        ids = list(completion.tokens)
        answer = parse_response(tokenizer, ids, prefix=prompt(item))
        row = {**item, "prompts": item["prompt"], "completions": [answer], "completion_ids": ids}
        columns = {name: [value] for name, value in row.items() if name not in ("prompt", "completion")}
        # A function without a reward for an answer returns None for it, or NaN. TRL leaves it out.
        values = [function(**columns)[0] for function in functions]
        rewards = [float(each) for each in values if each is not None and not math.isnan(each)]
        if not rewards:
            raise ValueError(
                f"no reward function has a reward for an answer to {item['prompt']!r:.200}: leave this row out"
            )
        return sum(rewards)

    return SingleTurn(prompt, reward, Sampling(args.max_completion_length, args.temperature))
