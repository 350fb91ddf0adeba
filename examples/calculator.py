"""A model learns to call a calculator: two calls and an answer, by GRPO after a few supervised steps, on any layout of ranks.

    torchrun --nproc-per-node 2 examples/calculator.py --backend fsdp:d2
    torchrun --nproc-per-node 2 examples/calculator.py --backend fsdp:d2 --output runs/control --shuffle-rewards

The reward is 1 for a right last answer. The run writes calculator.json with its curves and the results on held-out questions.
"""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import tyro
from curves import Curves
from report import Report
from significance import p_value_of_rise
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal import (
    FinetuneSpec,
    MicroBatchSpec,
    OptimizerConfig,
    SaveLoadMeta,
    TrainEngine,
    TrainEngineConfig,
    create_engine,
)
from areal.chat import Chat, ToolCall
from areal.inference import LocalRollout, Sampling
from areal.trainer.estimators import GroupRelative, Sample
from areal.trainer.grpo import grpo_trainer
from areal.trainer.losses import sft_objective
from areal.trainer.rollout import Plan, Runner, Sequence
from areal.trainer.rollout.exchange import gather
from areal.trainer.rollout.seeded import SeededClient
from areal.trainer.rollout.tool_episode import ToolEpisode
from areal.utils.distributed import init_default_group
from areal.utils.platform import fast_dtype

SYMBOLS = {"plus": "+", "minus": "-", "times": "*"}
TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools: "
    "{% for tool in tools %}{{ tool.function.name }}({{ tool.function.parameters.properties | join(', ') }}){% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>"
    '{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The turns of SmolLM2, whose template does not support tools."""
Item = dict[str, Any]


def calculate(a: int, operation: str, b: int) -> str:
    """Compute with two numbers.

    Args:
        a: first number.
        operation: plus, minus or times.
        b: second number.
    """
    if max(abs(a), abs(b)) >= 10**6:
        raise ValueError("numbers have at most six digits")
    return str({"plus": a + b, "minus": a - b, "times": a * b}[operation])


@dataclass(frozen=True)
class CalculatorConfig:
    """Settings of a run."""

    model: str = "runs/SmolLM2-135M-Instruct"
    """Directory of the model. examples/smollm.py writes the default."""
    output: Path = Path("runs/calculator")
    """Output directory."""
    backend: str = "fsdp:d1"
    """Engine and layout."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Dtype of the computation; auto selects the machine's fastest."""
    seed: int = 0
    """Seed of the questions and of all answers."""
    warmup_steps: int = 4
    """Supervised steps before reinforcement learning."""
    warmup_batch_size: int = 6
    """Conversations in a supervised step."""
    warmup_lr: float = 1e-4
    """Learning rate of the supervised steps."""
    steps: int = 12
    """Batches of rollouts."""
    groups: int = 8
    """Questions in a batch."""
    group_size: int = 4
    """Episodes of each question."""
    lr: float = 1e-5
    """Learning rate of AdamW."""
    eval_size: int = 60
    """Held-out questions."""
    shuffle_rewards: bool = False
    """Control experiment: shuffle the rewards of each batch, so that nothing can be learned from them."""


def questions(number: int, seed: int) -> list[Item]:
    """Return questions with two operations."""
    draw = random.Random(seed)
    items = []
    for _ in range(number):
        a, b, c = draw.randint(10, 99), draw.randint(10, 99), draw.randint(2, 9)
        first, second = draw.choice(("plus", "minus")), draw.choice(("times", "plus"))
        middle = calculate(a, first, b)
        steps = [(a, first, b, middle), (int(middle), second, c, calculate(int(middle), second, c))]
        question = f"What is {a} {first} {b}, and that {second} {c}?"
        items.append({"question": question, "answer": steps[-1][-1], "steps": steps})
    return items


def asked(item: Item) -> list[dict[str, Any]]:
    """Return the first messages."""
    return [{"role": "user", "content": item["question"]}]


def solved(item: Item) -> list[dict[str, Any]]:
    """Return a conversation with both calls and the answer."""
    messages = asked(item)
    for a, operation, b, result in item["steps"]:
        call = ToolCall("calculate", {"a": a, "operation": operation, "b": b})
        messages += [{"role": "assistant", "content": "", "tool_calls": [call.message()]}, call.result(result)]
    return [*messages, {"role": "assistant", "content": item["answer"]}]


def reward(item: Item, messages: list[dict[str, Any]]) -> float:
    """Return 1 if the last message is the answer."""
    return float(messages[-1]["content"].strip() == item["answer"])


def engine_of(config: CalculatorConfig, path: str, steps: int, lr: float) -> TrainEngine:
    """Return an initialized engine."""
    made = create_engine(
        TrainEngineConfig(
            path=path,
            backend=config.backend,
            dtype=fast_dtype() if config.dtype == "auto" else config.dtype,
            seed=config.seed,
            mb_spec=MicroBatchSpec(max_tokens_per_mb=4096, share_prefixes=True),
            optimizer=OptimizerConfig(lr=lr),
        )
    )
    made.initialize(FinetuneSpec(total_train_steps=steps))
    return made


def warm_up(config: CalculatorConfig, chat: Chat, items: list[Item], report: Report) -> str:
    """Train on solved questions, and return the directory of the model."""
    engine = engine_of(config, config.model, config.warmup_steps, config.warmup_lr)
    for step in range(config.warmup_steps):
        batch = items[step * config.warmup_batch_size : (step + 1) * config.warmup_batch_size]
        mine = batch[engine.dp_rank :: engine.dp_size]
        taken = engine.train_batch([chat.sample(solved(item)) for item in mine], sft_objective())
        report.line(f"warm-up {step + 1}/{config.warmup_steps}  loss {taken.loss:.3f}  {taken.seconds:.1f} s")
    engine.save(SaveLoadMeta(config.output / "warm", weight_format="hf"))
    engine.destroy()
    return str(config.output / "warm")


def examine(rollout: LocalRollout, episode: ToolEpisode, items: list[Item], seed: int) -> list[Sequence]:
    """Return an episode of each held-out question; the same on all ranks. Two models with one seed differ in their weights only."""
    rank, size = dist.get_rank(), dist.get_world_size()

    async def play() -> list[list[Sequence]]:
        mine = list(enumerate(items))[rank::size]
        return await asyncio.gather(*(episode.run(SeededClient(rollout, (seed, i)), item) for i, item in mine))

    parts = gather([sequence for (sequence,) in asyncio.run(play())])
    return [parts[i % size][i // size] for i in range(len(items))]


def main(config: CalculatorConfig) -> None:
    """Warm up, examine, train, and examine again."""
    init_default_group()
    report, curves = Report(enabled=dist.get_rank() == 0), Curves()
    config.output.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(config.model)
    tokenizer.chat_template = TEMPLATE
    chat = Chat(tokenizer, [calculate])
    sizes = (config.warmup_steps * config.warmup_batch_size, config.steps * config.groups, config.eval_size)
    shown, trained, held_out = (questions(size, 3 * config.seed + i) for i, size in enumerate(sizes))
    start = warm_up(config, chat, shown, report)
    engine = engine_of(config, start, config.steps, config.lr)
    model: Any = AutoModelForCausalLM.from_pretrained(
        start, dtype=getattr(torch, engine.config.dtype), attn_implementation="sdpa"
    )
    episode = ToolEpisode(chat, [calculate], asked, reward, Sampling(48), max_turns=4, max_tokens=160)

    def shuffled(rewards: Tensor, samples: list[Sample]) -> Tensor:
        generator = torch.Generator().manual_seed(int(samples[0]["group_ids"]) + config.seed)
        return rewards[torch.randperm(len(rewards), generator=generator)]

    def report_step(scalars: dict[str, float]) -> None:
        means = "  ".join(
            f"{name} {scalars[f'rollout/{name}']:.2f}" for name in ("reward", "turns", "tool_calls", "tool_errors")
        )
        report.line(
            f"step {len(curves.values['rollout/reward'])}/{config.steps}  {means}  {scalars['time/step']:.1f} s"
        )

    with LocalRollout(model.to(engine.device).eval(), max_context=1024, page_size=16) as rollout:

        def sync(source: Any, version: int) -> None:
            rollout.update(source.named_tensors(), version)

        sync(engine, 0)
        before = examine(rollout, episode, held_out, config.seed)
        plan = Plan(groups=config.groups, group_size=config.group_size, max_staleness=0, seed=config.seed)
        runner = Runner(rollout, episode, trained, plan)
        shape = shuffled if config.shuffle_rewards else None
        trainer = grpo_trainer(engine, runner, sync, estimator=GroupRelative(shape=shape), tracker=curves)
        trainer.train(config.steps, after_step=report_step)
        runner.close()
        sync(engine, engine.version)
        after = examine(rollout, episode, held_out, config.seed)

    right = [[sequence.reward == 1 for sequence in each] for each in (before, after)]
    calls = [sum(sequence.stats["tool_calls"] for sequence in each) / len(each) for each in (before, after)]
    p_value = p_value_of_rise(*right)
    report.line(
        f"held-out questions right: {sum(right[0])} -> {sum(right[1])} of {len(held_out)}; one-sided p = {p_value:.2g}; "
        f"calls in an episode: {calls[0]:.2f} -> {calls[1]:.2f}"
    )
    if dist.get_rank() == 0:
        results = {
            "settings": asdict(config),
            "right": [sum(each) for each in right],
            "calls": calls,
            "p_value": p_value,
        }
        (config.output / "calculator.json").write_text(
            json.dumps(results | {"curves": curves.values}, indent=1, default=str) + "\n"
        )
    engine.destroy()


if __name__ == "__main__":
    main(tyro.cli(CalculatorConfig, description=__doc__))
