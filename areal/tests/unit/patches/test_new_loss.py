"""A new policy loss: its function and its surrogate in a module, and both in the list of the package."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from areal.api import Batch, TokenOutputs
from areal.tests.unit.patches.patching import Patch
from areal.trainer import losses

MODULE, LIST = "areal/trainer/losses/policy_squared.py", "areal/trainer/losses/__init__.py"
PATCH = Patch(
    {
        MODULE: '''"""Policy loss with the square of the ratio."""

from dataclasses import dataclass

from torch import Tensor

from areal.api import Batch
from areal.trainer.losses.masked import at_trained, log_ratio
from areal.trainer.losses.policy import PolicyLoss, policy_inputs


def squared_loss(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> PolicyLoss:
    """Return ``-A ratio^2``."""
    ratio = log_ratio(logprobs, old, mask).exp()
    return PolicyLoss(-at_trained(advantages, mask) * ratio**2)


@dataclass(frozen=True)
class Squared:
    """Options of :func:`squared_loss`."""

    old: str = "old_logprobs"

    def __call__(self, logprobs: Tensor, batch: Batch) -> PolicyLoss:
        return squared_loss(*policy_inputs(logprobs, batch, self.old))
''',
        LIST: {
            "from areal.trainer.losses.policy_smooth import DRO, SAPO, dro_loss, sapo_loss": (
                "from areal.trainer.losses.policy_squared import Squared, squared_loss\n"
            ),
            '"SequenceMeanOfSums",': '    "Squared",\n',
            '"sft_objective",': '    "squared_loss",\n',
        },
    }
)


def unlisted(modules: list[ModuleType]) -> Iterator[str]:
    """Yield a line for each loss, objective and surrogate of these modules that the package does not list."""
    package = sys.modules["areal.trainer.losses"]
    for module in modules:
        for name, value in vars(module).items():
            own = getattr(value, "__module__", None) == module.__name__ and not name.startswith("_")
            surrogate = isinstance(value, type) and hasattr(value, "old") and "__call__" in vars(value)
            named = name.endswith(("_loss", "_objective")) and name != "clipped_loss"
            if own and (named or surrogate) and not (name in package.__all__ and hasattr(package, name)):
                yield f"{name} of {module.__name__}: import it in {LIST}, and add it to __all__ there"


def test_losses_are_listed() -> None:
    modules = [
        importlib.import_module(f"{losses.__name__}.{each.name}") for each in pkgutil.iter_modules(losses.__path__)
    ]
    assert len(modules) > 9
    assert list(unlisted(modules)) == []


def test_a_loss_needs_two_source_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    PATCH.apply(tmp_path, monkeypatch)
    assert list(unlisted([sys.modules["areal.trainer.losses.policy_squared"]])) == []
    package = importlib.import_module("areal.trainer.losses")
    logprobs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    data = {"loss_mask": torch.ones(3), "advantages": torch.ones(3), "old_logprobs": torch.tensor([-1.0, -2.0, -2.0])}
    batch = Batch(data, torch.tensor([0, 3]), {})
    total, metrics = package.policy_objective(package.Squared()).loss_fn(TokenOutputs(logprobs=logprobs), batch)
    assert total.item() == pytest.approx(-2 - torch.tensor(-2.0).exp().item())
    assert set(metrics) == {"policy/advantage"}
    assert len(PATCH.files) <= 2


def test_a_loss_that_is_not_listed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    PATCH.without(LIST).apply(tmp_path, monkeypatch)
    lines = list(unlisted([sys.modules["areal.trainer.losses.policy_squared"]]))
    assert [line.split()[0] for line in lines] == ["squared_loss", "Squared"]
    assert all("areal/trainer/losses/__init__.py" in line for line in lines)
