"""Reinforcement learning on sums, by the Tinker SDK: groups of answers, centred rewards, importance sampling.

    areal serve --model runs/SmolLM2-135M-Instruct
    TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-local python examples/tinker/tinker_rl.py

``--from-state PATH`` begins with the weights of a supervised run, which knows the form of an answer.
"""

from __future__ import annotations

import argparse
from typing import Any

import tinker
from arithmetic import Problem, accuracy, datum, is_right, new_adapter, problems, prompt_ids


def play(tokenizer: Any, client: Any, asked: list[Problem], seed: int) -> tuple[list[tinker.Datum], float]:
    """Sample eight answers to each question. Return the samples to train on and the mean reward."""
    params = tinker.SamplingParams(max_tokens=8, temperature=1.0, stop=[tokenizer.eos_token_id], seed=seed)
    prompts = [prompt_ids(tokenizer, problem) for problem in asked]
    futures = [client.sample(tinker.ModelInput.from_ints(prompt), 8, params) for prompt in prompts]
    data, total = [], 0.0
    for problem, prompt, future in zip(asked, prompts, futures, strict=True):
        answers = future.result().sequences
        rewards = [float(is_right(tokenizer, problem, answer.tokens)) for answer in answers]
        total += sum(rewards) / len(rewards)
        for answer, reward in zip(answers, rewards, strict=True):
            # A group whose answers are all right or all wrong has nothing to learn from.
            if advantage := reward - sum(rewards) / len(rewards):
                advantages = [advantage] * len(answer.tokens)
                data.append(datum(prompt, answer.tokens, logprobs=answer.logprobs, advantages=advantages))
    return data, total / len(asked)


def main(from_state: str | None, min_rise: float) -> None:
    service = tinker.ServiceClient(user_metadata={"recipe": "rl"})
    training = service.create_training_client_from_state(from_state).result() if from_state else new_adapter(service)
    tokenizer, held_out = training.get_tokenizer(), problems(100, seed=1)
    print(f"accuracy before: {(before := accuracy(tokenizer, training, held_out)):.2f}", flush=True)
    for step in range(1, 16):
        client = training.save_weights_and_get_sampling_client().result()
        data, reward = play(tokenizer, client, problems(16, seed=200 + step), seed=step)
        print(f"step {step}: reward {reward:.3f}, {len(data)} answers to train on", flush=True)
        if data:
            passed = training.forward_backward(data, loss_fn="importance_sampling")
            training.optim_step(tinker.AdamParams(learning_rate=5e-4, beta2=0.95, eps=1e-8)).result()
            passed.result()
    print(f"accuracy after: {(after := accuracy(tokenizer, training, held_out)):.2f}")
    print(f"saved {training.save_state('final').result().path}")
    if after - before < min_rise:
        raise SystemExit(f"the accuracy rose by {after - before:.2f}, and not by {min_rise}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Reinforcement learning on sums, by the Tinker SDK.")
    parser.add_argument("--from-state", help="path of a saved state, such as tinker://RUN/weights/step-6")
    parser.add_argument("--min-rise", type=float, default=-1.0, help="fail unless the accuracy rises by this")
    main(**vars(parser.parse_args()))
