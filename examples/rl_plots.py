"""Plots of a run of reinforcement learning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot

PANELS = {
    "rollout/reward": "mean reward of a batch",
    "actor/policy/entropy": "entropy (nats per token)",
    "actor/kl_ref/k3": "KL from the start (nats per token)",
}


def plot_run(
    path: Path, title: str, curves: Mapping[str, Sequence[float]], accuracy: Mapping[int, float], task: str
) -> None:
    """Plot reward, held-out accuracy, entropy and KL from the initial model to a PNG file.

    Args:
        path: output file.
        title: title of the figure.
        curves: values of each step, counted from 1, by names of :data:`PANELS`. Panels without values stay empty.
        accuracy: accuracy on held-out problems, by number of steps taken.
        task: name of the problems.
    """
    figure, axes = pyplot.subplots(2, 2, figsize=(9, 6), layout="constrained")
    panels = dict(zip(PANELS, (axes[0, 0], axes[1, 0], axes[1, 1]), strict=True))
    for name, axis in panels.items():
        values = curves.get(name, ())
        axis.plot(range(1, len(values) + 1), values, linewidth=1.5)
        axis.set(title=PANELS[name], xlabel="step")
    axes[0, 1].plot(list(accuracy), list(accuracy.values()), "o-", color="black", linewidth=1)
    axes[0, 1].set(title=f"held-out accuracy, {task}", xlabel="step", ylim=(0, 1))
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
