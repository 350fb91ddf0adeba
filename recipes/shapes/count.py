"""Count the shapes in pictures: supervised steps, then GRPO on sampled answers of one word.

    python recipes/shapes/count.py runs/shapes/seed-0 0
    python recipes/shapes/count.py runs/shapes/control 0 shuffled

In the control, each question has the picture of another one, so that nothing can be learned. Prints the accuracy on held-out
pictures and writes it to ``curve.json`` in the folder of the run, as pairs of a step and an accuracy.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from pictures import COUNTS, chat, conversation, write_model
from torch import Tensor

from areal import FinetuneSpec, OptimizerConfig, TrainEngine, TrainEngineConfig, create_engine
from areal.api import StepSettings
from areal.trainer.advantages import Groups, grpo, to_samples
from areal.trainer.losses import ImportanceSampling, TokenMean, policy_objective, sft_objective

PICTURES, HELD_OUT, SUPERVISED, REINFORCED, GROUP = 64, 256, 90, 110, 8
EVERY = 10
"""Steps between evaluations."""

Sample = dict[str, Tensor]

_chat = chat()
_ANSWERS = torch.tensor([_chat.template.ids(word)[0] for word in COUNTS])


def samples(n: int, rng: random.Random, *, shuffled: bool) -> list[Sample]:
    """Return questions with their right answers as samples; with the pictures of other questions if shuffled."""
    counts = [rng.randint(1, len(COUNTS)) for _ in range(n)]
    made = [_chat.sample(conversation(count, rng)) for count in counts]
    if shuffled:
        pictures = [sample["pixel_values"] for sample in made]
        rng.shuffle(pictures)
        made = [{**sample, "pixel_values": x} for sample, x in zip(made, pictures, strict=True)]
    return made


def place(sample: Sample) -> int:
    """Return the position that predicts the answer."""
    return int(sample["loss_mask"].argmax())


def right_answers(questions: list[Sample]) -> Tensor:
    """Return the tokens of the right answers, ``[n]``."""
    return torch.stack([sample["input_ids"][place(sample) + 1] for sample in questions])


def answer_logprobs(engine: TrainEngine, questions: list[Sample]) -> Tensor:
    """Return the log-probs of all tokens as the answer to each question, ``[n, V]``."""
    logits = engine.forward_batch(questions, outputs=("logits",))
    return torch.stack([each[place(sample)] for each, sample in zip(logits, questions, strict=True)]).log_softmax(-1)


def accuracy(engine: TrainEngine, held_out: list[Sample]) -> float:
    """Return the share of held-out pictures whose likeliest answer is right."""
    return float((answer_logprobs(engine, held_out).argmax(-1) == right_answers(held_out)).double().mean())


def sampled(engine: TrainEngine, questions: list[Sample], noise: torch.Generator) -> list[Sample]:
    """Return a group of answers to each question, drawn among the words for counts, with advantages from rewards of 0 and 1."""
    logprobs = answer_logprobs(engine, questions)
    drawn = _ANSWERS[torch.multinomial(logprobs[:, _ANSWERS].exp(), GROUP, replacement=True, generator=noise)]
    rewards = (drawn == right_answers(questions)[:, None]).float().flatten()
    advantages = grpo(rewards, Groups.local(torch.arange(len(questions)).repeat_interleave(GROUP)))
    batch: list[Sample] = []
    for question, known, tokens in zip(questions, logprobs, drawn, strict=True):
        at, length = place(question), len(question["input_ids"])
        for token in tokens:
            ids, old, mask = question["input_ids"].clone(), torch.zeros(length), torch.zeros(length)
            ids[at + 1], old[at], mask[at] = token, known[token], 1.0
            batch.append({**question, "input_ids": ids, "rollout_logprobs": old, "loss_mask": mask})
    values = to_samples(advantages, [sample["loss_mask"] for sample in batch])
    return [{**sample, "advantages": value} for sample, value in zip(batch, values, strict=True)]


def main(folder: str, seed: int, *, shuffled: bool) -> None:
    path = Path(folder)
    rng, noise = random.Random(seed), torch.Generator().manual_seed(seed)
    held_out = samples(HELD_OUT, random.Random(-1 - seed), shuffled=shuffled)
    curve: list[tuple[int, float]] = []
    options: dict[str, Any] = {"path": write_model(path / "model"), "dtype": "float32", "init_from_scratch": True}
    optimizer = OptimizerConfig(lr=1.5e-3, gradient_clipping=1.0, warmup_steps=10, lr_scheduler="constant")
    with create_engine(TrainEngineConfig(**options, seed=seed, optimizer=optimizer)) as engine:
        engine.initialize(FinetuneSpec(total_train_steps=SUPERVISED + REINFORCED))
        supervised, policy = sft_objective(), policy_objective(ImportanceSampling(old="rollout_logprobs"), TokenMean())
        for step in range(SUPERVISED + REINFORCED + 1):
            if step % EVERY == 0:
                curve.append((step, accuracy(engine, held_out)))
                print(f"step {step}: accuracy {curve[-1][1]:.3f}", flush=True)
                (path / "curve.json").write_text(json.dumps(curve))
            if step == SUPERVISED + REINFORCED:
                break
            batch = samples(PICTURES, rng, shuffled=shuffled)
            if step < SUPERVISED:
                engine.forward_backward(batch, supervised)
                engine.optimizer_step()
            else:
                engine.forward_backward(sampled(engine, batch[: PICTURES // 4], noise), policy)
                engine.optimizer_step(StepSettings(lr=4e-4))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), shuffled=sys.argv[3:] == ["shuffled"])
