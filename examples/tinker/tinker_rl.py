"""Reinforcement learning on sums, by the Tinker SDK: groups of answers, centred rewards, importance sampling.

    areal serve --model runs/SmolLM2-135M-Instruct
    TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-local python examples/tinker/tinker_rl.py

``--from-state PATH`` begins with the weights of a supervised run, which knows the form of an answer.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import tinker
from arithmetic import Question, accuracy, datum, is_right, prompt_ids, questions, served_model


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--eval-size", type=int, default=100)
    parser.add_argument("--from-state", help="path of a saved state, such as tinker://RUN/weights/step-6")
    parser.add_argument("--min-rise", type=float, help="fail unless the accuracy on held-out sums rises by this")
    return parser.parse_args()


def rollout(
    tokenizer: Any, client: tinker.SamplingClient, problems: Sequence[Question], group_size: int, seed: int
) -> tuple[list[tinker.Datum], float]:
    """Sample a group of answers to each question. Return the samples to train on and the mean reward."""
    params = tinker.SamplingParams(max_tokens=8, temperature=1.0, stop=[tokenizer.eos_token_id], seed=seed)
    prompts = [prompt_ids(tokenizer, problem) for problem in problems]
    futures = [client.sample(tinker.ModelInput.from_ints(prompt), group_size, params) for prompt in prompts]
    data, total = [], 0.0
    for problem, prompt, future in zip(problems, prompts, futures, strict=True):
        answers = future.result().sequences
        rewards = [float(is_right(tokenizer, problem, answer.tokens)) for answer in answers]
        mean = sum(rewards) / len(rewards)
        total += mean
        # A group whose answers are all right or all wrong has nothing to learn from.
        for answer, reward in zip(answers, rewards, strict=True):
            if reward != mean and answer.logprobs is not None:
                advantages = [reward - mean] * len(answer.tokens)
                data.append(datum(prompt, answer.tokens, logprobs=answer.logprobs, advantages=advantages))
    return data, total / len(problems)


def main(args: argparse.Namespace) -> None:
    # 1. A model with a new adapter, or with the weights of a saved one.
    service = tinker.ServiceClient(user_metadata={"recipe": "rl"})
    if args.from_state:
        training = service.create_training_client_from_state(args.from_state).result()
    else:
        training = service.create_lora_training_client(served_model(), rank=args.rank, seed=0).result()
    tokenizer = training.get_tokenizer()
    held_out = questions(args.eval_size, seed=1)

    # 2. Steps: answers of the current weights, then one update.
    adam = tinker.AdamParams(learning_rate=args.lr, beta2=0.95, eps=1e-8)
    before: float | None = None
    for step in range(1, args.steps + 1):
        client = training.save_weights_and_get_sampling_client().result()
        if before is None:
            before = accuracy(tokenizer, client, held_out)
            print(f"accuracy before: {before:.2f}", flush=True)
        data, reward = rollout(tokenizer, client, questions(args.groups, seed=200 + step), args.group_size, seed=step)
        if data:
            passed = training.forward_backward(data, loss_fn="importance_sampling")
            stepped = training.optim_step(adam)
            passed.result()
            stepped.result()
        print(f"step {step}: reward {reward:.3f}, {len(data)} answers to train on", flush=True)

    # 3. The accuracy on sums that were not trained on, and the weights.
    after = accuracy(tokenizer, training.save_weights_and_get_sampling_client().result(), held_out)
    print(f"accuracy after: {after:.2f}")
    print(f"saved {training.save_state('final').result().path}")
    if args.min_rise is not None and after - (before or 0.0) < args.min_rise:
        raise SystemExit(f"the accuracy rose by {after - (before or 0.0):.2f}, and not by {args.min_rise}")


if __name__ == "__main__":
    main(parse())
