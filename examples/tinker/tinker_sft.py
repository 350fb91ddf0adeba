"""Supervised fine-tuning on sums, by the Tinker SDK.

    areal serve --model runs/SmolLM2-135M-Instruct
    TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-local python examples/tinker/tinker_sft.py

The run is saved every six steps. ``--resume PATH`` continues a saved one at its next step, with its optimizer.
"""

from __future__ import annotations

import argparse

import tinker
from arithmetic import accuracy, datum, new_adapter, problems, prompt_ids


def main(resume: str | None, eval_size: int, min_rise: float) -> None:
    # 1. A model with an adapter: a new one, or a saved one.
    service = tinker.ServiceClient(user_metadata={"recipe": "sft"})
    if resume:
        training = service.create_training_client_from_state_with_optimizer(resume).result()
    else:
        training = new_adapter(service)
    tokenizer = training.get_tokenizer()
    held_out = problems(eval_size, seed=1)
    before = accuracy(tokenizer, training, held_out)
    print(f"accuracy before: {before:.2f}", flush=True)

    # 2. Steps. Both requests of a step are sent before the first result is read, so that the server does not wait.
    for step in range(int(resume.rpartition("-")[2]) + 1 if resume else 1, 13):
        batch, tokens = [], 0
        for problem in problems(32, seed=100 + step):
            answer = [*tokenizer.encode(problem.answer, add_special_tokens=False), tokenizer.eos_token_id]
            batch.append(datum(prompt_ids(tokenizer, problem), answer, weights=[1.0] * len(answer)))
            tokens += len(answer)
        passed = training.forward_backward(batch, loss_fn="cross_entropy")
        stepped = training.optim_step(tinker.AdamParams(learning_rate=1e-3, beta2=0.95, eps=1e-8))
        print(f"step {step}: loss {passed.result().metrics['loss:sum'] / tokens:.4f} per token", flush=True)
        stepped.result()
        if step % 6 == 0:
            print(f"saved {training.save_state(f'step-{step}', ttl_seconds=86_400).result().path}", flush=True)

    # 3. The accuracy on sums that were not trained on.
    after = accuracy(tokenizer, training, held_out)
    print(f"accuracy after: {after:.2f}")
    if after - before < min_rise:
        raise SystemExit(f"the accuracy rose by {after - before:.2f}, and not by {min_rise}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Supervised fine-tuning on sums, by the Tinker SDK.")
    parser.add_argument("--resume", help="path that this script has printed, such as tinker://RUN/weights/step-6")
    parser.add_argument("--eval-size", type=int, default=100)
    parser.add_argument("--min-rise", type=float, default=-1.0, help="fail unless the accuracy rises by this")
    main(**vars(parser.parse_args()))
