"""Recipes on a fixed data set: supervised fine-tuning, direct preference optimisation, reward models."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, Generic, TypeVar

from areal.api import TrainEngine, TrainEngineConfig
from areal.engine.model.hub import max_positions, read_config
from areal.recipes.config import DPOConfig, FixedDataConfig, RewardModelConfig, SFTConfig
from areal.recipes.data.formats import finished_messages, pair_of
from areal.recipes.data.rows import DataRows
from areal.recipes.functions import load_function
from areal.recipes.run import Run
from areal.recipes.setup import own_rows, renderer
from areal.trainer.losses import Objective, dpo_objective
from areal.trainer.preference import Pair, dpo_trainer, flatten_pairs, reward_trainer
from areal.trainer.supervised import SupervisedOptions, SupervisedTrainer, sft_trainer
from areal.trainer.trackers import Tracker
from areal.utils.data import Segment, ShardedLoader, sharded_loader

C = TypeVar("C", bound=FixedDataConfig)


class SupervisedRun(Run[C], Generic[C]):
    """A run on a fixed data set.

    Args:
        config: settings.
        dataset: rows; ``None`` reads ``config.dataset``.
        evaluation: rows for evaluation; ``None`` reads ``config.evaluation``, or holds rows out.
        objective: loss to minimise; ``None`` takes that of the recipe.
        engine: engine to train, not initialized; ``None`` makes one.
        tracker: receives the numbers; ``None`` makes those of ``config.trackers``.

    Attributes:
        loader: batches of this rank.
        rows: rows to train on.
        held_out: rows for evaluation; ``None`` without any.
    """

    judged_by = "eval/loss"
    larger_is_better = False
    shown: ClassVar[tuple[str, ...]] = ("train/loss", "train/grad_norm", "train/lr", "train/seconds")
    """Numbers of a step on the console."""

    trainer: SupervisedTrainer
    loader: ShardedLoader

    def __init__(
        self,
        config: C,
        dataset: Any = None,
        evaluation: Any = None,
        *,
        objective: Objective | None = None,
        engine: TrainEngine | None = None,
        tracker: Tracker | None = None,
    ) -> None:
        self._dataset, self._evaluation = dataset, evaluation
        self._objective, self._engine = objective, engine
        super().__init__(config, tracker)

    # ---- what recipes differ in

    kind: ClassVar[str]
    """Format of the rows."""

    @abstractmethod
    def item(self, row: Any) -> Any:
        """Return what the loader yields for a row."""

    @abstractmethod
    def length(self, item: Any) -> int:
        """Return the number of tokens of the longest sequence of an item."""

    @abstractmethod
    def _make_trainer(self, options: SupervisedOptions) -> SupervisedTrainer:
        """Return the trainer."""

    def engine_config(self) -> TrainEngineConfig:
        """Return the configuration of the engine."""
        return self.config.engine_config()

    # ---- the run

    def _prepare(self) -> None:
        self.rows, self.held_out = own_rows(self.config, self.kind, self._dataset, self._evaluation)
        tools = tuple(load_function(name) for name in self.config.tools)
        self.chat = renderer(self.config, self.tokenizer, tools)
        limit = self.config.max_length or max_positions(read_config(self.config.model))
        self._train_items = self._items(self.rows, limit)
        self._held_out_items = [] if self.held_out is None else self._items(self.held_out, limit)

    def _build(self) -> None:
        config, items = self.config, self._train_items
        self.engine = self._engine or self.engines.create(self.engine_config())
        self.loader = sharded_loader(
            items,
            batch_size=config.batch_size,
            dp_rank=self.engine.dp_rank,
            dp_size=self.engine.dp_size,
            seed=config.seed,
            shuffle=config.shuffle,
            costs=[self.length(item) for item in items],
        )
        self.steps = config.steps_of(len(self.loader))
        self.engine.initialize(config.spec(self.steps))
        self._start_tracking()
        self.trainer = self._make_trainer(
            {"tracker": self.tracker, "checkpoints": self.checkpoints, "profile": self.config.profile}
        )

    def _items(self, rows: DataRows, limit: int | None) -> list[Any]:
        """Return the items of all rows.

        Raises:
            ValueError: a row is longer than the model's context, or than ``max_length``.
        """
        items = []
        for number, row in enumerate(rows):
            items.append(self.item(row))
            length = self.length(items[-1])
            if limit is not None and length > limit:
                name = "max_length" if self.config.max_length else "the model's context"
                raise ValueError(
                    f"{rows.place(number)}: the row has {length} tokens, and {name} is {limit}: leave it out, or shorten it"
                )
        return items

    def evaluate(self) -> dict[str, float]:
        """Return loss and metrics of the held-out rows; empty without any. Collective."""
        if not self._held_out_items:
            return {}
        mine = self._held_out_items[self.engine.dp_rank :: self.engine.dp_size]
        output = self.trainer.evaluate(self.trainer.prepare(mine))
        return {f"eval/{name}": float(value) for name, value in ({"loss": output.loss} | dict(output.metrics)).items()}


class SFTRun(SupervisedRun[SFTConfig]):
    """Supervised fine-tuning on conversations, or on prompts with answers."""

    recipe, kind = "sft", "sft"

    def item(self, row: Any) -> Any:
        """Return the sample of a conversation."""
        return self.chat.sample(finished_messages(row, self.config.system), self.config.train)

    def first_sample(self) -> tuple[Segment, ...]:
        """Return the first conversation."""
        return self.chat.segments(finished_messages(self.rows[0], self.config.system), self.config.train)

    def length(self, item: Any) -> int:
        """Return its number of tokens."""
        return len(item["input_ids"])

    def _make_trainer(self, options: SupervisedOptions) -> SupervisedTrainer:
        if self._objective is None:
            return sft_trainer(self.engine, self.loader, **options)
        return SupervisedTrainer(self.engine, self._objective, self.loader, **options)


class PairRun(SupervisedRun[C], Generic[C]):
    """A run on pairs of answers."""

    kind = "pairs"
    shown = ("train/loss", "train/preference/accuracy", "train/preference/margin", "train/seconds")

    def item(self, row: Any) -> Pair:
        """Return the pair of a row."""
        return pair_of(self.chat, row, self.config.system)

    def first_sample(self) -> tuple[Segment, ...]:
        """Return the first prompt with its better answer."""
        pair = self.item(self.rows[0])
        return Segment(pair.prompt, trainable=False), Segment(pair.chosen, trainable=True)

    def length(self, item: Any) -> int:
        """Return the tokens of the longer answer with its prompt."""
        return len(item.prompt) + max(len(item.chosen), len(item.rejected))


class DPORun(PairRun[DPOConfig]):
    """Direct preference optimisation.

    Attributes:
        reference: engine of the reference model; with adapters the trained engine itself.
    """

    recipe = "dpo"

    def _make_trainer(self, options: SupervisedOptions) -> SupervisedTrainer:
        self.reference = self.engine
        if self.engine.config.lora is None:
            self.reference = self.engines.make(self.config.engine_config(optimizer=None), self.steps)
        objective = self._objective or dpo_objective(beta=self.config.beta)
        return dpo_trainer(self.engine, self.reference, self.loader, objective=objective, **options)


class RewardModelRun(PairRun[RewardModelConfig]):
    """A reward model from pairs of answers."""

    recipe = "rm"
    judged_by = "eval/preference/accuracy"
    larger_is_better = True

    def engine_config(self) -> TrainEngineConfig:
        """Return the configuration of an engine with a value head."""
        return self.config.engine_config(value_head=True)

    def _make_trainer(self, options: SupervisedOptions) -> SupervisedTrainer:
        if self._objective is not None:
            return SupervisedTrainer(self.engine, self._objective, self.loader, prepare=flatten_pairs, **options)
        return reward_trainer(self.engine, self.loader, center_coef=self.config.center_coef, **options)
