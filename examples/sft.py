"""Supervised fine-tuning of a language model on problems with a verifier, on any layout of ranks.

    torchrun --nproc-per-node 2 examples/sft.py --backend fsdp:d2
    torchrun --nproc-per-node 2 examples/sft.py --backend fsdp:c2 --model path/or/hub-name --task simple_equations

Runs on different layouts train on the same global batches and have the same losses.

The run writes losses.json, loss.png and model/ (for transformers' from_pretrained) to the output directory. The exit
code is not 0 if the reloaded model disagrees with the engine, or if a condition of --min-loss-fall, --accuracy-must-rise
or --max-loss-difference is not met.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
import tyro
from chat import ChatFormat
from checks import failures, largest_difference, reload_error
from evaluation import accuracy, held_out_loss
from history import History
from plain import model_from_weights
from plots import plot_losses
from report import Report
from settings import SFTConfig
from tasks import Task, make_task
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from areal import (
    FinetuneSpec,
    SaveLoadMeta,
    TrainEngine,
    create_engine,
)
from areal.api import Batch, Stateful, TokenOutputs
from areal.trainer.monitoring import StepProfile
from areal.utils.data.loader import sharded_loader


def sft_loss(outputs: TokenOutputs, batch: Batch) -> Tensor:
    """Return the negative log-likelihood of the answers, summed. The engine divides by the number of answer tokens."""
    if outputs.logprobs is None:
        raise ValueError("sft_loss needs outputs=('logprobs',)")
    return -(outputs.logprobs * batch["loss_mask"]).sum()


class Run:
    """One run of supervised fine-tuning.

    Args:
        config: settings of the run.
        engine: initialized. An algorithm has an engine and calls its verbs.
    """

    def __init__(self, config: SFTConfig, engine: TrainEngine) -> None:
        self.config = config
        self.engine = engine
        self.report = Report(enabled=dist.get_rank() == 0)
        self.chat = ChatFormat(AutoTokenizer.from_pretrained(config.model), config.system, plain=config.plain)
        self.task: Task = make_task(
            config.task, config.steps * config.batch_size, config.eval_size, config.seed, config.task_options
        )
        self.held_out = self.chat.samples(self.task.held_out)
        self.history = History()
        # In the order of their generation, so that the batches do not depend on the number of steps.
        train = self.chat.samples(self.task.train)
        self.loader = sharded_loader(
            train,
            batch_size=config.batch_size,
            dp_rank=engine.dp_rank,
            dp_size=engine.dp_size,
            seed=config.seed,
            shuffle=False,
            costs=[len(sample["input_ids"]) for sample in train],
        )

    def go(self) -> list[str]:
        """Evaluate, train, evaluate, save, check.

        Returns:
            One sentence per condition that is not met; equal on all ranks.
        """
        self.config.output.mkdir(parents=True, exist_ok=True)
        self.resume_if_asked()
        if self.history.steps == 0:
            self.evaluate()
        self.train()
        plain = self.evaluate()
        path = self.config.output / "model"
        self.report.line(f"writing {path}, and loading it with plain transformers")
        self.engine.save(SaveLoadMeta(path=path, weight_format="hf"))
        samples = self.held_out[: max(self.config.reload_samples, self.engine.dp_size)]
        self.history.reload_error = reload_error(self.engine, path, samples, plain)
        return self.conclude()

    def train(self) -> None:
        """Train until the steps or the time are used up. Times are those of the slowest rank, so that all ranks stop together."""
        limit = self.config.max_train_seconds or float("inf")
        profile = StepProfile(self.config.profile)
        with self.report.progress("step", self.config.steps, done=self.history.steps) as advance:
            for batch in self.loader:
                with profile.step(self.engine):
                    step = self.engine.train_batch(batch, sft_loss)
                self.history.add(step)
                advance(
                    f"loss {step.loss:.4f}  grad norm {step.grad_norm:.2f}  "
                    f"{step.n_tokens} tokens in {step.n_mbs} micro-batches a rank  {step.seconds:.1f} s"
                )
                if self.config.checkpoint_every and self.history.steps % self.config.checkpoint_every == 0:
                    self.engine.save(self.checkpoint(self.history.steps))
                if sum(self.history.seconds) >= limit:
                    break

    def evaluate(self) -> PreTrainedModel:
        """Measure loss and accuracy on held-out problems.

        Returns:
            The plain transformers model that generated the answers, with the engine's weights.
        """
        begin, steps = time.perf_counter(), self.history.steps
        self.history.held_out_loss[steps] = held_out_loss(self.engine, self.held_out, sft_loss)
        dtype = getattr(torch, self.config.compute_dtype)
        plain = model_from_weights(self.config.model, self.engine.named_tensors(), dtype, self.engine.device)
        self.history.accuracy[steps] = accuracy(
            plain, self.chat, self.task, self.config.max_new_tokens, self.config.eval_batch_size, self.report
        )
        self.report.line(
            f"after {steps} steps: loss {self.history.held_out_loss[steps]:.4f}, "
            f"accuracy {self.history.accuracy[steps]:.3f} on {len(self.task.held_out)} held-out problems, "
            f"{time.perf_counter() - begin:.1f} s"
        )
        return plain

    def checkpoint(self, step: int) -> SaveLoadMeta:
        """Return the description of a checkpoint with weights, optimizer, loader and history."""
        stateful: dict[str, Stateful] = {"loader": self.loader, "history": self.history}
        return SaveLoadMeta(
            path=self.checkpoints / f"step-{step:06d}", weight_format="dcp", stateful=stateful, keep_last=1
        )

    @property
    def checkpoints(self) -> Path:
        """Directory of the checkpoints."""
        return self.config.output / "checkpoints"

    def resume_if_asked(self) -> None:
        """Load the newest checkpoint. Each rank finds the same one: a checkpoint appears complete or not at all."""
        if not self.config.resume:
            return
        steps = [int(path.name.removeprefix("step-")) for path in self.checkpoints.glob("step-*[0-9]")]
        if not steps:
            raise ValueError(
                f"--resume: there is no checkpoint in {self.checkpoints}; run with --checkpoint-every first"
            )
        self.engine.load(self.checkpoint(max(steps)))
        self.report.line(f"resumed after step {self.history.steps}")

    def conclude(self) -> list[str]:
        """Write and plot the results. Returns one sentence per condition that is not met."""
        config, history = self.config, self.history
        runs = {config.backend: history.train_loss}
        failed = failures(history, config.min_loss_fall, config.accuracy_must_rise)
        if config.compare is not None:
            other = History.read(config.compare)
            runs[str(config.compare)] = other.train_loss
            difference = largest_difference(history, other)
            self.report.line(f"training losses differ from those of {config.compare} by at most {difference:.1e}")
            if config.max_loss_difference is not None and not difference <= config.max_loss_difference:
                failed.append(
                    f"training losses differ from those of {config.compare} by {difference:.1e}, "
                    f"which is more than {config.max_loss_difference:.1e}"
                )
        if dist.get_rank() == 0:
            title = f"{Path(config.model).name} on {config.task}, {config.backend}, {config.compute_dtype}"
            plot_losses(config.output / "loss.png", title, runs, history.held_out_loss)
            history.write(config.output / "losses.json", asdict(config))
        self.report.table(f"{config.task} on {config.backend}, {config.compute_dtype}", *history.table())
        self.report.line(f"loss curve: {config.output / 'loss.png'}; numbers: {config.output / 'losses.json'}")
        for sentence in failed:
            self.report.line(f"FAILED: {sentence}")
        return failed


def main(config: SFTConfig) -> int:
    """Run. Returns the exit code."""
    if not sys.stdout.isatty():
        transformers_logging.disable_progress_bar()
    with create_engine(config.engine()) as engine:
        engine.initialize(FinetuneSpec(total_train_steps=config.steps))
        return 1 if Run(config, engine).go() else 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(SFTConfig, description=__doc__)))
