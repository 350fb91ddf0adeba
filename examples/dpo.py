"""Direct preference optimisation on pairs of answers.

    python examples/smollm.py runs/SmolLM2-135M-Instruct
    python examples/tiny.py runs/tiny
    torchrun --nproc-per-node 2 examples/dpo.py --backend fsdp:d2
    torchrun --nproc-per-node 8 examples/dpo.py --backend megatron:d2t4 --model path/or/hub-name --lr 1e-6

The run writes model/ to the output directory.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack

import torch.distributed as dist
import tyro
from chat import ChatFormat
from preferences import PreferenceConfig, make_pairs
from report import Report
from transformers import AutoTokenizer

from areal import FinetuneSpec, SaveLoadMeta, create_engine
from areal.api import StepOutput
from areal.trainer.preference import dpo_trainer
from areal.utils.data import sharded_loader


def main(config: PreferenceConfig) -> int:
    """Train. Returns exit code 1 if the margin of the chosen answers did not rise."""
    spec = FinetuneSpec(total_train_steps=config.steps)
    with ExitStack() as stack:
        engine = reference = stack.enter_context(create_engine(config.engine()))
        engine.initialize(spec)
        if config.lora is None:
            reference = stack.enter_context(create_engine(config.engine(optimizer=None)))
            reference.initialize(spec)
        report = Report(enabled=dist.get_rank() == 0)
        train, _ = make_pairs(
            config, ChatFormat(AutoTokenizer.from_pretrained(config.model), config.system, plain=config.plain)
        )
        loader = sharded_loader(
            train, batch_size=config.batch_size, dp_rank=engine.dp_rank, dp_size=engine.dp_size, seed=config.seed
        )
        margins: list[float] = []
        with report.progress("step", config.steps) as advance:

            def report_step(step: StepOutput) -> None:
                margins.append(step.metrics["preference/margin"])
                advance(f"loss {step.loss:.4f}  margin {margins[-1]:.3f}  {step.seconds:.1f} s")

            dpo_trainer(engine, reference, loader, profile=config.profile).train(config.steps, after_step=report_step)
        engine.save(SaveLoadMeta(config.output / "model", weight_format="hf"))
        report.line(f"margin {margins[0]:.3f} -> {margins[-1]:.3f}; model: {config.output / 'model'}")
        return int(margins[-1] <= margins[0])


if __name__ == "__main__":
    sys.exit(main(tyro.cli(PreferenceConfig, description=__doc__)))
