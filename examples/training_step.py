"""Train with a loss function of your own, on any engine and layout.

    python examples/training_step.py fsdp:d1 Qwen/Qwen2.5-0.5B-Instruct
    torchrun --nproc-per-node 2 examples/training_step.py fsdp:d2 Qwen/Qwen2.5-0.5B-Instruct

The losses that are printed are equal on every layout: data parallel (``fsdp:d2``), context parallel (``fsdp:c2``), tensor parallel
(``megatron:t2``), or on another engine (``jax:d1``).
"""

import sys

import torch
from transformers import AutoTokenizer

from areal import FinetuneSpec, OptimizerConfig, TrainEngineConfig, create_engine

TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "To be, or not to be, that is the question.",
    "All happy families are alike.",
    "Call me Ishmael.",
)


def focal_loss(outputs, batch):
    """Return a cross-entropy in which tokens that the model predicts well count less.

    Tensors are packed, ``[T]`` tokens of several sequences. A loss is a sum: the engine divides it by the number of predicted tokens of
    the batch on all ranks.
    """
    return -((1 - outputs.logprobs.exp()) ** 2 * outputs.logprobs).sum()


def main(layout: str, model: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    batch = [{"input_ids": torch.tensor(tokenizer(text)["input_ids"])} for text in TEXTS]

    config = TrainEngineConfig(path=model, backend=layout, dtype="float32", optimizer=OptimizerConfig(lr=1e-3))
    with create_engine(config) as engine:
        engine.initialize(FinetuneSpec(total_train_steps=5))
        # Each data-parallel rank passes its own samples.
        mine = batch[engine.dp_rank :: engine.dp_size]
        for number in range(1, 6):
            step = engine.train_batch(mine, focal_loss)
            if engine.is_main and engine.dp_rank == 0:
                print(f"step {number}: loss {step.loss:.5f}, gradient norm {step.grad_norm:.4f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
