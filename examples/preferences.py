"""Train on pairs of answers: the model itself by DPO, or a reward model.

    python examples/preferences.py dpo Qwen/Qwen2.5-0.5B-Instruct 20
    python examples/preferences.py rm Qwen/Qwen2.5-0.5B-Instruct 20

In each pair the answer that only has the number is preferred to a sentence. The fraction of held-out pairs in which the preferred
answer has the higher reward is printed. The trained model is in ``runs/dpo/model`` or ``runs/rm/model``: that of ``rm`` has a value
head, in a separate file.
"""

import sys
from typing import Any

from areal.recipes import dpo, reward_model

PAIRS = [
    {"prompt": f"What is {a} + {b}?", "chosen": f"{a + b}", "rejected": f"The sum of {a} and {b} is {a + b}."}
    for a in range(2, 20)
    for b in range(2, 20)
]


def main(method: str, model: str, steps: str) -> None:
    recipe = {"dpo": dpo, "rm": reward_model}[method]
    run: Any = recipe(model, PAIRS, steps=int(steps), held_out=32, lr=1e-5, output=f"runs/{method}")
    print(f"held-out accuracy {run.train()['eval/preference/accuracy']:.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
