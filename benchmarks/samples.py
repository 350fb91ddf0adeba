"""Time that the samples of a run take: lines and page, by the number of tokens that are logged in a step.

python -m benchmarks.samples --model runs/SmolLM2-135M-Instruct
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch
import tyro
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from areal.recipes.record.samples import SampleLog
from areal.recipes.setup import decoder


def main(
    model: str, groups: int = 2, group_size: int = 8, tokens: tuple[int, ...] = (256, 2048), steps: int = 30
) -> None:
    """Print the milliseconds of a step without the page, and the share of the page in a run of steps of one second.

    Args:
        model: directory of a tokenizer.
        groups: groups that are logged.
        group_size: answers of a group.
        tokens: tokens of a sequence; half of them are trained on.
        steps: number of steps.
    """
    tokenizer = AutoTokenizer.from_pretrained(model)
    for length in tokens:
        batch = [sample(tokenizer, length, group) for group in range(groups) for _ in range(group_size)]
        with tempfile.TemporaryDirectory() as folder:
            log = SampleLog(Path(folder), groups, decoder(tokenizer))
            seconds = []
            for step in range(1, steps + 1):
                begin = time.perf_counter()
                log(step, batch)
                seconds.append(time.perf_counter() - begin)
            log.close()
            pages = [each for each in seconds if each > 2 * sorted(seconds)[steps // 2]]
            size = (Path(folder) / "samples.html").stat().st_size / 1e6
        lines = sorted(seconds)[steps // 2]
        print(
            f"{groups * group_size} x {length} tokens: {1e3 * lines:.1f} ms a step, {len(pages)} pages in {sum(seconds):.2f} s, "
            f"the last of {size:.1f} MB"
        )


def sample(tokenizer: PreTrainedTokenizerBase, length: int, group: int) -> dict[str, Tensor]:
    """Return a sample of random tokens, as a trainer scores it."""
    mask = torch.zeros(length)
    mask[length // 2 : -1] = 1
    logprobs = -torch.rand(length)
    return {
        "input_ids": torch.randint(len(tokenizer), (length,)),
        "loss_mask": mask,
        "old_logprobs": logprobs,
        "rollout_logprobs": logprobs + 1e-3,
        "advantages": mask,
        "versions": torch.zeros(length, dtype=torch.int64),
        "rewards": torch.tensor(1.0),
        "group_ids": torch.tensor(group),
        "truncated": torch.tensor(False),
    }


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
