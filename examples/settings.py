"""Settings of a run, parsed from the command line."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from areal import LoRAConfig, MicroBatchSpec, OptimizerConfig, TrainEngineConfig
from areal.utils.platform import fast_dtype


@dataclass(frozen=True)
class TaskConfig:
    """Model, layout and problems of a run."""

    model: str = "runs/SmolLM2-135M-Instruct"
    """Model directory or hub name. examples/smollm.py writes the default."""
    backend: str = "fsdp:d1"
    """Engine and layout; the product of the degrees is the number of processes."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Dtype of the computation; weights and optimizer state are float32. auto selects the machine's fastest dtype."""
    task: str = "chain_sum"
    """Data set of reasoning-gym."""
    task_options: dict[str, int | float | str] = field(default_factory=dict)
    """Options of the data set, as name and value pairs. Default: those in tasks.py, or else the data set's defaults."""
    system: str = "Answer with just the number."
    """Instruction before each question; may be empty."""
    plain: bool = False
    """Do not use the chat template: fewer tokens, and suited to base models."""
    lora_rank: int = 0
    """Rank of adapters on all linear layers, which need about ten times the learning rate; 0 trains the model itself."""

    profile: Path | None = None
    """Directory for a profile of the second step: a trace and a memory timeline of each rank."""

    @property
    def lora(self) -> LoRAConfig | None:
        """Adapter configuration for ``lora_rank``; ``None`` for 0."""
        return LoRAConfig(rank=self.lora_rank, alpha=2.0 * self.lora_rank) if self.lora_rank else None

    @property
    def compute_dtype(self) -> Literal["bfloat16", "float32"]:
        """``dtype`` with ``"auto"`` resolved for this machine."""
        return fast_dtype() if self.dtype == "auto" else self.dtype


@dataclass(frozen=True)
class SFTConfig(TaskConfig):
    """One run of supervised fine-tuning."""

    steps: int = 30
    """Optimizer steps."""
    max_train_seconds: float | None = None
    """Seconds of training after which the run stops. None sets no limit."""
    batch_size: int = 64
    """Problems in a global batch."""
    max_tokens_per_mb: int = 1024
    """Maximum tokens in a packed micro-batch."""
    lr: float = 2e-5
    """Peak learning rate of AdamW."""
    lr_scheduler: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Learning-rate schedule after the warm-up."""
    warmup_steps: int = 2
    """Steps over which the learning rate rises."""
    seed: int = 0
    """Seed of the problems and their order."""
    eval_size: int = 200
    """Held-out problems."""
    eval_batch_size: int = 50
    """Problems that a rank answers at once."""
    max_new_tokens: int = 8
    """Maximum tokens of an answer."""
    reload_samples: int = 16
    """Held-out problems on which the engine is compared with the reloaded checkpoint."""
    output: Path = Path("runs/sft")
    """Output directory."""
    checkpoint_every: int = 0
    """Steps between checkpoints; the newest is kept. 0 writes none."""
    resume: bool = False
    """Continue from the newest checkpoint in the output directory, on the same or another layout."""
    min_loss_fall: float = 0.0
    """Fraction by which the held-out loss must fall, or the run fails."""
    accuracy_must_rise: bool = False
    """Fail unless the accuracy on held-out problems rises."""
    compare: Path | None = None
    """losses.json of another run, to plot and compare with this one."""
    max_loss_difference: float | None = None
    """Largest relative difference between the training losses of this run and the compared one."""

    def engine(self) -> TrainEngineConfig:
        """Return the configuration of the engine."""
        return TrainEngineConfig(
            path=self.model,
            backend=self.backend,
            dtype=self.compute_dtype,
            seed=self.seed,
            mb_spec=MicroBatchSpec(max_tokens_per_mb=self.max_tokens_per_mb),
            optimizer=OptimizerConfig(lr=self.lr, lr_scheduler=self.lr_scheduler, warmup_steps=self.warmup_steps),
            lora=self.lora,
        )
