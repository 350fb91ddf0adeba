"""A reward model from pairs of answers.

    python examples/smollm.py runs/SmolLM2-135M-Instruct
    python examples/tiny.py runs/tiny
    torchrun --nproc-per-node 2 examples/reward_model.py --backend fsdp:d2
    torchrun --nproc-per-node 8 examples/reward_model.py --backend fsdp:d8 --model path/or/hub-name --lr 1e-5

The run writes model/ to the output directory, with the value head in a separate file.
"""

from __future__ import annotations

import sys

import torch.distributed as dist
import tyro
from chat import ChatFormat
from preferences import PreferenceConfig, make_pairs
from report import Report
from transformers import AutoTokenizer

from areal import FinetuneSpec, SaveLoadMeta, create_engine
from areal.api import StepOutput
from areal.trainer.preference import flatten_pairs, reward_trainer
from areal.utils.data import sharded_loader


def main(config: PreferenceConfig) -> int:
    """Train and evaluate. Returns exit code 1 if the accuracy on held-out pairs is not above chance."""
    with create_engine(config.engine(value_head=True)) as engine:
        engine.initialize(FinetuneSpec(total_train_steps=config.steps))
        report = Report(enabled=dist.get_rank() == 0)
        train, held_out = make_pairs(
            config, ChatFormat(AutoTokenizer.from_pretrained(config.model), config.system, plain=config.plain)
        )
        loader = sharded_loader(
            train, batch_size=config.batch_size, dp_rank=engine.dp_rank, dp_size=engine.dp_size, seed=config.seed
        )
        trainer = reward_trainer(engine, loader, profile=config.profile)
        with report.progress("step", config.steps) as advance:

            def report_step(step: StepOutput) -> None:
                advance(
                    f"loss {step.loss:.4f}  accuracy {step.metrics['preference/accuracy']:.2f}  {step.seconds:.1f} s"
                )

            trainer.train(config.steps, after_step=report_step)
        after = trainer.evaluate(flatten_pairs(held_out[engine.dp_rank :: engine.dp_size]))
        accuracy = after.metrics["preference/accuracy"]
        engine.save(SaveLoadMeta(config.output / "model", weight_format="hf"))
        report.line(f"held-out loss {after.loss:.4f}, accuracy {accuracy:.3f}; model: {config.output / 'model'}")
        return int(accuracy <= 0.5)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(PreferenceConfig, description=__doc__)))
