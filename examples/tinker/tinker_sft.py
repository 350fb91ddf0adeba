"""Supervised fine-tuning on sums, by the Tinker SDK.

    areal serve --model runs/SmolLM2-135M-Instruct
    TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-local python examples/tinker/tinker_sft.py

The run is saved every few steps. ``--resume PATH`` continues a saved one at its next step, with its optimizer.
"""

from __future__ import annotations

import argparse

import tinker
from arithmetic import accuracy, answer_ids, datum, prompt_ids, questions, served_model


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--save-every", type=int, default=6)
    parser.add_argument("--eval-size", type=int, default=100)
    parser.add_argument("--resume", help="path that this recipe has printed, such as tinker://RUN/weights/step-6")
    parser.add_argument("--min-rise", type=float, help="fail unless the accuracy on held-out sums rises by this")
    return parser.parse_args()


def main(args: argparse.Namespace) -> None:
    # 1. A model with an adapter: a new one, or a saved one.
    service = tinker.ServiceClient(user_metadata={"recipe": "sft"})
    done = 0
    if args.resume:
        done = int(args.resume.rpartition("-")[2])
        training = service.create_training_client_from_state_with_optimizer(args.resume).result()
    else:
        training = service.create_lora_training_client(served_model(), rank=args.rank, seed=0).result()
    tokenizer = training.get_tokenizer()
    held_out = questions(args.eval_size, seed=1)
    before = accuracy(tokenizer, training.save_weights_and_get_sampling_client().result(), held_out)
    print(f"accuracy before: {before:.2f}", flush=True)

    # 2. Steps. Both requests of a step are sent before the first result is read, so that the server does not wait.
    adam = tinker.AdamParams(learning_rate=args.lr, beta2=0.95, eps=1e-8)
    for step in range(done + 1, args.steps + 1):
        batch = []
        for question in questions(args.batch_size, seed=100 + step):
            answer = answer_ids(tokenizer, question)
            batch.append(datum(prompt_ids(tokenizer, question), answer, weights=[1.0] * len(answer)))
        passed = training.forward_backward(batch, loss_fn="cross_entropy")
        stepped = training.optim_step(adam)
        tokens = sum(sum(each.loss_fn_inputs["weights"].data) for each in batch)
        loss = passed.result().metrics["loss:sum"] / tokens
        stepped.result()
        print(f"step {step}: loss {loss:.4f} per token", flush=True)
        if step % args.save_every == 0:
            print(f"saved {training.save_state(f'step-{step}', ttl_seconds=86_400).result().path}", flush=True)

    # 3. The accuracy on sums that were not trained on.
    after = accuracy(tokenizer, training.save_weights_and_get_sampling_client().result(), held_out)
    print(f"accuracy after: {after:.2f}", flush=True)
    if args.min_rise is not None and after - before < args.min_rise:
        raise SystemExit(f"the accuracy rose by {after - before:.2f}, and not by {args.min_rise}")


if __name__ == "__main__":
    main(parse())
