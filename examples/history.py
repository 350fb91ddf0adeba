"""Measurements of a run: written as JSON at its end, and saved with checkpoints, so that a resumed run has all of them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from areal.api import StepOutput


@dataclass
class History:
    """Losses in nats per answer token.

    Attributes:
        train_loss: loss of each step's global batch, before that step.
        grad_norm: gradient norm of each step, before clipping.
        n_tokens: tokens of each step's global batch.
        seconds: wall time of each step.
        held_out_loss: loss on held-out problems, by number of steps taken.
        accuracy: fraction of held-out problems answered right, by number of steps taken.
        reload_error: result of :func:`checks.reload_error`.
    """

    train_loss: list[float] = field(default_factory=list)
    grad_norm: list[float] = field(default_factory=list)
    n_tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    held_out_loss: dict[int, float] = field(default_factory=dict)
    accuracy: dict[int, float] = field(default_factory=dict)
    reload_error: dict[str, float] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """Number of steps taken."""
        return len(self.train_loss)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the global batches per second inside ``train_batch``."""
        return sum(self.n_tokens) / max(sum(self.seconds), 1e-9)

    def add(self, step: StepOutput) -> None:
        """Append a training step."""
        self.train_loss.append(step.loss)
        self.grad_norm.append(step.grad_norm if step.grad_norm is not None else 0.0)
        self.n_tokens.append(step.n_tokens)
        self.seconds.append(step.seconds)

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return header and rows of a table of results, at the end of a run."""
        loss, right = list(self.held_out_loss.values()), list(self.accuracy.values())
        rows = [
            ["held-out loss (nats per answer token)", f"{loss[0]:.4f}", f"{loss[-1]:.4f}"],
            ["held-out accuracy (exact match)", f"{right[0]:.3f}", f"{right[-1]:.3f}"],
            ["training loss, first and last step", f"{self.train_loss[0]:.4f}", f"{self.train_loss[-1]:.4f}"],
            ["optimizer steps", "", f"{self.steps}"],
            ["tokens a step", "", f"{min(self.n_tokens)} to {max(self.n_tokens)}"],
            ["training tokens a second", "", f"{self.tokens_per_second:.0f}"],
            ["reloaded log-probs differ by (mean nats)", "", f"{self.reload_error['mean']:.1e}"],
            ["rounding accounts for (mean nats)", "", f"{self.reload_error['bound']:.1e}"],
        ]
        return ["", "before", "after"], rows

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"json": json.dumps(asdict(self))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state from a checkpoint."""
        for name, value in json.loads(state_dict["json"]).items():
            # JSON has only strings for keys.
            setattr(
                self, name, {int(k): v for k, v in value.items()} if name in ("held_out_loss", "accuracy") else value
            )

    def write(self, path: Path, settings: dict[str, Any]) -> None:
        """Write as JSON, with the run's settings."""
        path.write_text(json.dumps({"settings": settings, **asdict(self)}, indent=1, default=str) + "\n")

    @classmethod
    def read(cls, path: Path) -> History:
        """Read a file that :meth:`write` wrote.

        Raises:
            ValueError: the file is missing.
        """
        if not path.is_file():
            raise ValueError(f"there is no {path}: it is written at the end of a run, into its output directory")
        measured = json.loads(path.read_text())
        del measured["settings"]
        history = cls()
        history.load_state_dict({"json": json.dumps(measured)})
        return history
