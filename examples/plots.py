"""Plot of the losses of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot


def plot_losses(path: Path, title: str, train: Mapping[str, Sequence[float]], held_out: Mapping[int, float]) -> None:
    """Plot loss curves to a PNG file.

    Args:
        path: output file.
        title: title of the figure.
        train: training loss of each step, by name of the run; steps count from 1.
        held_out: held-out loss by number of steps taken.
    """
    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for name, losses in train.items():
        axes.plot(range(1, len(losses) + 1), losses, label=name, linewidth=1.5)
    axes.plot(list(held_out), list(held_out.values()), "o--", color="black", label="held out", linewidth=1)
    axes.set(title=title, xlabel="optimizer step", ylabel="loss (nats per answer token)")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
