"""Installed releases of other packages: what an old one cannot do is refused by name."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from areal.api import TrainEngineConfig
from areal.engine.batch_rules import Experts, RoutingRules
from areal.engine.fsdp import router
from areal.engine.fsdp.pipeline.schedule_specs import choose_schedule
from areal.tests.harness.refused import refused_by_old_release
from areal.utils import releases


@pytest.mark.parametrize(
    ("text", "release"), [("2.11.0", (2, 11)), ("2.13.0+cpu", (2, 13)), ("5.6", (5, 6)), ("3.0rc1", (3, 0))]
)
def test_release_is_the_first_two_numbers(monkeypatch: pytest.MonkeyPatch, text: str, release: tuple[int, int]) -> None:
    monkeypatch.setattr(releases, "version", lambda package: text)
    assert releases.installed_release("torch") == release


@pytest.mark.parametrize("schedule", ["InterleavedZeroBubble", "ZBVZeroBubble"])
def test_old_torch_is_refused_by_option_and_versions(monkeypatch: pytest.MonkeyPatch, schedule: str) -> None:
    config = TrainEngineConfig(path="model", backend="fsdp:p2v2", fsdp={"pipeline_schedule": schedule})
    monkeypatch.setattr(releases, "version", lambda package: {"torch": "2.11.0+cpu"}[package])
    message = (
        f"fsdp.pipeline_schedule = '{schedule}': needs torch 2.13 or newer, installed is 2.11.0+cpu; "
        "pip install 'torch>=2.13', or leave it out"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        choose_schedule(config)
    monkeypatch.setattr(releases, "version", lambda package: {"torch": "2.13.0"}[package])
    assert choose_schedule(config).name == schedule


@pytest.mark.parametrize("attributes", [{"_fsdp_param_groups": ["a", "b"]}, {"_fsdp_param_group": "a"}])
def test_groups_of_a_module_are_a_list_in_every_release(attributes: dict[str, Any]) -> None:
    module: Any = SimpleNamespace(_get_fsdp_state=lambda: SimpleNamespace(**attributes))
    assert releases.fsdp_param_groups(module) == (["a", "b"] if "_fsdp_param_groups" in attributes else ["a"])


def test_module_without_parameters_has_no_groups_in_an_old_release() -> None:
    module: Any = SimpleNamespace(_get_fsdp_state=lambda: SimpleNamespace(_fsdp_param_group=None))
    assert releases.fsdp_param_groups(module) == []


def test_old_torch_cannot_reset_a_model() -> None:
    calls: list[str] = []
    assert not releases.reset_iter_state(SimpleNamespace())
    assert releases.reset_iter_state(SimpleNamespace(reset_iter_state=lambda: calls.append("reset")))
    assert calls == ["reset"]


def test_sums_of_gradients_are_kept_as_each_release_does() -> None:
    calls: list[Any] = []
    new = SimpleNamespace(_set_unsharded_grad_dtypes=lambda defer_upcast: calls.append(defer_upcast))
    releases.accumulate_gradients(new)
    parameter = SimpleNamespace(
        accumulate_unsharded_grad_if_needed=lambda: calls.append("add"),
        to_accumulated_grad_if_needed=lambda: calls.append("start"),
    )
    releases.accumulate_gradients(SimpleNamespace(fsdp_params=[parameter]))
    assert calls == [False, "add", "start"]


def test_sum_is_dropped_only_where_it_can_be_set() -> None:
    class Old:
        unsharded_accumulated_grad: int | None

    class New:
        @property
        def unsharded_accumulated_grad(self) -> int:
            return 3

    old, new = Old(), New()
    old.unsharded_accumulated_grad = 3
    releases.drop_accumulated(old)
    releases.drop_accumulated(new)
    assert (old.unsharded_accumulated_grad, new.unsharded_accumulated_grad) == (None, 3)


@pytest.mark.parametrize(
    ("installed", "reason"), [("5.6.0", "LocalRollout: needs transformers 5.19"), ("5.19.0", None), ("6.0", None)]
)
def test_refusal_is_a_skip_only_where_the_release_is_old(
    monkeypatch: pytest.MonkeyPatch, installed: str, reason: str | None
) -> None:
    monkeypatch.setattr(releases, "version", lambda package: "5.6.0")
    with pytest.raises(ValueError, match=r"^LocalRollout: needs transformers 5\.19 or newer") as caught:
        releases.require_release("transformers", (5, 19), "LocalRollout")
    monkeypatch.setattr(releases, "version", lambda package: installed)
    assert refused_by_old_release(f"rank 0 of 1 failed:\nE  ValueError: {caught.value}") == reason
    assert refused_by_old_release("LocalRollout failed") is None


def test_router_of_an_old_transformers_is_refused_with_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (releases, router):
        monkeypatch.setattr(module, "version", lambda package: "5.6.0")
    reason = router.why_no_router("deepseek_v3")
    assert reason == "the router of 'deepseek_v3' needs transformers 5.14 or newer, installed is 5.6.0"
    rules = RoutingRules(Experts(), 1, reason)
    with pytest.raises(ValueError, match=re.escape(reason)):
        rules.check_outputs(("logprobs", "routed_experts"))
    assert router.why_no_router("qwen2").startswith("no router of 'qwen2' is one of")
