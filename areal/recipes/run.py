"""A run: an engine, its trainer, and what goes on between the steps. Recipes assemble it."""

from __future__ import annotations

import itertools
import sys
from abc import ABC, abstractmethod
from contextlib import ExitStack
from functools import cached_property
from types import TracebackType
from typing import Any, ClassVar, Generic, Self, TypeVar

from tqdm import tqdm

from areal.api import SaveLoadMeta, TrainEngine
from areal.dispatch.errors import WorkerLostError
from areal.recipes.config import RunConfig
from areal.recipes.data.rows import DataRows
from areal.recipes.engines import Engines
from areal.recipes.interrupt import EXIT_CODE, Interrupt
from areal.recipes.record.progress import Results
from areal.recipes.record.run_record import check_record, check_rows_of_record, start_record
from areal.recipes.record.trackers import make_trackers
from areal.recipes.setup import checkpoints_of, tokenizer_of
from areal.trainer.checkpoints import Checkpoints
from areal.trainer.ppo import PPOTrainer
from areal.trainer.supervised import SupervisedTrainer
from areal.trainer.trackers import Tracker, Trackers
from areal.utils.data.sequences import Segment

C = TypeVar("C", bound=RunConfig)


class Run(ABC, Generic[C]):
    """A run of training, from its settings and the objects that were passed in place of those that the settings would make.

    The constructor reads and checks settings, rows and functions. :meth:`build` makes engine and trainer, which are attributes then, and
    :meth:`train` trains. All ranks make the same run and call its methods together. As a context, or after :meth:`train`, it closes what it
    made.

    Attributes:
        config: settings.
        tokenizer: tokenizer of the model, with the chat template of the settings.
        rows: rows to train on.
        held_out: rows for evaluation; ``None`` without any.
        engine: engine that is trained, initialized.
        trainer: takes the steps.
        tracker: receives the numbers of each step and of each evaluation.
        checkpoints: checkpoints of ``trainer``.
        results: results of the evaluations so far.
        steps: number of batches to train on.
        engines: makes the engines of the run.
    """

    recipe: ClassVar[str]
    """Name of the recipe, as a command."""
    judged_by: ClassVar[str]
    """Number by which evaluations are compared."""
    larger_is_better: ClassVar[bool]
    """Direction of this comparison."""
    shown: ClassVar[tuple[str, ...]]
    """Numbers of a step on the console."""

    config: C
    engine: TrainEngine
    trainer: SupervisedTrainer | PPOTrainer
    tracker: Tracker
    checkpoints: Checkpoints
    steps: int
    rows: DataRows
    held_out: DataRows | None

    def __init__(self, config: C, tracker: Tracker | None = None) -> None:
        self.config, self._tracker = config, tracker
        self.results = Results(self.judged_by, larger_is_better=self.larger_is_better)
        self.closing = ExitStack()
        self._built = False
        check_record(config)
        self.tokenizer = tokenizer_of(config)
        self._prepare()
        for name in ("eval_every", "keep_best") if self.held_out is None else ():
            if value := getattr(config, name):
                raise ValueError(
                    f"{name} = {value} without rows for evaluation: set evaluation or held_out, or leave it out"
                )

    @abstractmethod
    def _prepare(self) -> None:
        """Read and check what needs no engine: rows, template, functions."""

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """Hash of the rows, by the name of their setting. Computed where it is needed: for many rows it takes seconds."""
        return {"dataset": self.rows.fingerprint()} | (
            {} if self.held_out is None else {"evaluation": self.held_out.fingerprint()}
        )

    @abstractmethod
    def _build(self) -> None:
        """Make engine, trainer and what they need. What is to be closed is entered in ``closing``."""

    @abstractmethod
    def first_sample(self) -> tuple[Segment, ...]:
        """Return the first row as the model sees it. Trained are the segments that are trainable."""

    @abstractmethod
    def evaluate(self) -> dict[str, float]:
        """Return numbers with names ``eval/...`` of the engine's weights; empty without rows for it. Collective."""

    def build(self) -> Self:
        """Make all parts, if that was not done. Collective.

        Raises:
            ValueError: a setting does not fit the model or this machine.
        """
        if not self._built:
            self._built = True
            if self.config.resume:
                check_rows_of_record(self.config, self.fingerprints)
            try:
                self.engines = Engines(self.config, self.closing)
                if self.speaks:
                    start_record(self.config, self.recipe, self.fingerprints)
                self._build()
            except BaseException:
                self.closing.close()
                raise
        return self

    def _start_tracking(self) -> None:
        """Make trackers and checkpoints. Called once the number of steps is known."""
        self.checkpoints = checkpoints_of(self.config, self.results)
        made = self._tracker
        if made is None:
            made = make_trackers(self.config, self.steps, self.shown) if self.speaks else Trackers(())
        self.tracker = made
        self.closing.callback(self.tracker.close)

    @property
    def speaks(self) -> bool:
        """True on the one rank that writes files and lines."""
        return self.engines.speaks

    # ---- the run

    def train(self) -> dict[str, float]:
        """Evaluate, train, evaluate, and save the model. Collective. Call it once.

        The first Ctrl-C ends the run after the step, with a checkpoint and exit code 130; the second one at once.

        Returns:
            The numbers of the last evaluation.
        """
        with self.build(), Interrupt() as self._interrupt:
            if self.config.resume and (done := self.trainer.resume()):
                self.say(f"resumed after step {done} of {self.steps}")
            self._interrupted = False
            if self._evaluates_after(self.trainer.step):
                self._add_evaluation()
            if not self._gave_up() and self.trainer.step < self.steps:
                self._take_steps()
            if self._interrupted:
                self._save_interrupted()
            if self.trainer.step not in self.results.by_step:
                self._add_evaluation()
            if self.config.save_model:
                self._save_model("model")
            self.say(f"finished {self.trainer.step} steps: {self.config.output}")
        return self.results.by_step.get(self.trainer.step, {})

    def _take_steps(self) -> None:
        """Train; after the loss of an actor, go on from the newest checkpoint."""
        for losses in itertools.count(1):
            try:
                # A checkpoint is saved before its step is evaluated: the loss may have come in between.
                if self._evaluates_after(self.trainer.step):
                    self._add_evaluation()
                return None if self._gave_up() else self.trainer.train(self.steps, after_step=self._after_step)
            except WorkerLostError as error:
                if losses > self.config.max_losses:
                    raise
                self.say(f"loss {losses} of at most {self.config.max_losses}: {error}")
            self.engines.restart()
            self.say(f"goes on after step {self.trainer.resume()}")

    def _after_step(self, _: Any) -> bool:
        """Do what is due after a step. Returns whether to go on; equal on all ranks."""
        # Also ranks that share a batch may learn of it at different times.
        self._interrupted = any(self.engine.control.gather(self._interrupt.noted))
        if self._interrupted:
            return False
        if self._evaluates_after(self.trainer.step):
            self._add_evaluation()
        return not self._gave_up()

    def _evaluates_after(self, step: int) -> bool:
        every = self.config.eval_every
        due = step == 0 or (every is not None and step % every == 0)
        return due and step not in self.results.by_step

    def _add_evaluation(self) -> None:
        scalars = self.evaluate()
        if not scalars:
            return
        step = self.trainer.step
        better = self.results.add(step, scalars)
        self.tracker.log(step, scalars)
        if better and self.config.keep_best and step:
            self._save_model("best")

    def _gave_up(self) -> bool:
        """Return whether evaluations have not become better for too long."""
        patience = self.config.patience
        if patience is None or self.results.since_best < patience:
            return False
        self.say(
            f"{self.judged_by} was best after step {self.results.best_step}; patience = {patience} evaluations are over"
        )
        return True

    # ---- files

    def _save_model(self, name: str) -> None:
        template = None if self.config.chat_template is None else str(self.tokenizer.chat_template)
        self.engine.save(SaveLoadMeta(self.config.output / name, chat_template=template))

    def _save_interrupted(self) -> None:
        self.checkpoints.save(self.trainer.engines(), self.trainer.step, self.trainer.stateful())
        self.say(
            f"interrupted after step {self.trainer.step} of {self.steps}; a checkpoint was saved: resume = true continues"
        )
        sys.exit(EXIT_CODE)

    def say(self, text: str) -> None:
        """Write a line on stderr, on one rank."""
        if self.speaks:
            tqdm.write(text, file=sys.stderr)

    # ---- end

    def close(self) -> None:
        """Close what the run made: engine, rollout, runner, trackers. May be called twice."""
        self.closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
