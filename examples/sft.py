"""Supervised fine-tuning on conversations of your own.

    python examples/sft.py Qwen/Qwen2.5-0.5B-Instruct 20
    torchrun --nproc-per-node 2 examples/sft.py Qwen/Qwen2.5-0.5B-Instruct 20 fsdp:d2

The arguments are model, steps and layout. The loss on conversations that are held out is computed before the first step and after
every fifth, and printed at the end. ``runs/sft`` has curves, checkpoints and, in ``model``, the trained model. The same command
continues a run that was stopped, by Ctrl-C or a fault; with a larger number of steps it continues a run that has ended.
"""

import sys

from areal.recipes import sft

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


def conversation(first: int, days: int) -> dict[str, list[dict[str, str]]]:
    """Return a row: a conversation of two turns. All answers are trained on."""
    return {
        "messages": [
            {"role": "user", "content": f"Which day is {days} days after {DAYS[first]}?"},
            {"role": "assistant", "content": DAYS[(first + days) % 7]},
            {"role": "user", "content": "And the day after that?"},
            {"role": "assistant", "content": DAYS[(first + days + 1) % 7]},
        ]
    }


def main(model: str, steps: str, layout: str = "fsdp:d1") -> None:
    run = sft(
        model,
        [conversation(first, days) for first in range(7) for days in range(2, 42)],
        backend=layout,
        steps=int(steps),
        batch_size=16,
        held_out=32,
        eval_every=5,
        checkpoint_every=5,
        resume=True,
        output="runs/sft",
    )
    numbers = run.train()
    if run.speaks:
        print(f"held-out loss {numbers['eval/loss']:.4f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
