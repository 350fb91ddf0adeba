"""Validation of adapters, optimizer settings, sampling parameters and metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from areal.tests.unit.tinker.service.fakes import LIMITS, integers, sample, settings, tokens
from areal.tinker.backends.errors import UserError
from areal.tinker.backends.prepared import AdamParams, AdapterSpec
from areal.tinker.service.params import check_metadata, check_sampling
from areal.tinker.service.requests import RawChunk
from areal.tinker.service.verbs.models import check_adapter
from areal.tinker.service.verbs.optimizer import check_adam, check_optimizer

SETTINGS = settings(Path("unused"))
ADAMW = frozenset({"adamw"})


def test_a_client_that_says_nothing_trains_all_kinds_of_layers() -> None:
    assert check_adapter({"rank": 8}, LIMITS) == AdapterSpec(8, None, True, True, True)
    given = {"rank": 8, "seed": 3, "train_attn": False, "train_mlp": True, "train_unembed": False}
    assert check_adapter(given, LIMITS) == AdapterSpec(8, 3, False, True, False)
    assert check_adapter({"rank": 8, "alpha": 4}, LIMITS).alpha == 4.0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "lora_config is missing"),
        ({}, "rank is None"),
        ({"rank": 0}, "rank is 0: it must be an integer from 1 to 16"),
        ({"rank": 17}, "rank is 17"),
        ({"rank": True}, "rank is True"),
        ({"rank": 2.5}, "rank is 2.5"),
        ({"rank": 4, "r": 3}, r"unknown keys \['r'\]"),
        ({"rank": 4, "alpha": 0}, "alpha is 0: it must be above 0"),
        ({"rank": 4, "alpha": float("inf")}, "alpha is inf: it must be a finite number"),
        ({"rank": 4, "alpha": "16"}, "alpha is '16': it must be a finite number"),
        ({"rank": 4, "seed": "x"}, "seed is 'x'"),
        ({"rank": 4, "train_mlp": 1}, "train_mlp is 1"),
        ({"rank": 4, "train_mlp": False, "train_attn": False, "train_unembed": False}, "trains no layers"),
    ],
)
def test_adapters_that_cannot_be_are_refused(config: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_adapter(config, LIMITS)


def test_settings_of_a_step() -> None:
    assert check_adam({}, "adamw", "adamw", ADAMW) == AdamParams(eps=1e-12)
    assert check_adam({"learning_rate": 0, "grad_clip_norm": 1}, "adamw", "adamw", ADAMW).grad_clip_norm == 1.0
    with pytest.raises(UserError, match=r"'dimuon': supported are \['adamw'\]"):
        check_adam({}, "dimuon", "adamw", ADAMW)
    with pytest.raises(UserError, match=r"'dimuon': supported are \['adamw'\]"):
        check_optimizer({"type": "dimuon", "version": 1}, ADAMW)
    with pytest.raises(UserError, match="was created with 'adamw'"):
        check_adam({}, "dimuon", "adamw", frozenset({"adamw", "dimuon"}))
    with pytest.raises(UserError, match=r"unknown keys \['lr'\]"):
        check_optimizer({"lr": 1}, ADAMW)
    nan = float("nan")
    wrong = {
        "learning_rate": (-1, nan, "x"),
        "beta1": (1, -0.1),
        "beta2": (1.0,),
        "eps": (-1, 0.0),
        "weight_decay": (-1,),
    }
    wrong |= {"grad_clip_norm": (-1, float("inf"), None), "momentum": (1,)}
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(UserError, match=name):
                check_adam({name: value}, "adamw", "adamw", ADAMW)


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (None, (None, None)),
        ("end", (("end",), None)),
        (["a", "b"], (("a", "b"), None)),
        ([3, 4], (None, (3, 4))),
        # No end at all, not even the model's own.
        ([], (None, ())),
    ],
)
def test_forms_of_stop(stop: Any, expected: Any) -> None:
    request = check_sampling(sample("s", sampling_params={"stop": stop, "max_tokens": 2}), LIMITS, SETTINGS)
    assert (request.stop_strings, request.stop_token_ids) == expected


def test_values_of_sampling_parameters() -> None:
    params = {"max_tokens": 5, "seed": 1, "temperature": 0.5, "top_k": 3, "top_p": 0.9}
    fields = {"num_samples": 3, "prompt_logprobs": True, "topk_prompt_logprobs": 2, "topk_sample_logprobs": 1}
    request = check_sampling(sample("s", sampling_params=params, **fields), LIMITS, SETTINGS)
    assert (request.max_tokens, request.seed, request.temperature, request.top_k, request.top_p) == (5, 1, 0.5, 3, 0.9)
    assert (request.num_samples, request.prompt_logprobs, request.prompt_top_k, request.sample_top_k) == (3, True, 2, 1)
    assert request.prompt == [1, 2]
    # Defaults of the protocol, and fields that a client sends as null.
    request = check_sampling(sample("s", sampling_params={"temperature": None, "seed": None}), LIMITS, SETTINGS)
    assert (request.temperature, request.top_k, request.top_p, request.max_tokens, request.seed) == (
        1.0,
        -1,
        1.0,
        None,
        None,
    )


WRONG_PARAMS = {
    "max_tokens": [0, -1, 1.5, True, "x", 31],
    "seed": [1.5, "x", 2**70],
    "stop": ["", [""], ["a", 1], [64], [-1], 3, {"a": 1}, [True], b"x", [1.5]],
    "temperature": [-0.1, float("nan"), "x", True],
    "top_k": [0, -2, 1.5],
    "top_p": [0, -1, 1.1, float("nan")],
    "frequency_penalty": [1.0],
}
WRONG_FIELDS = {
    "num_samples": [0, -1, 1.5, True, 10**6],
    "topk_prompt_logprobs": [-1, 65, 1.5],
    "topk_sample_logprobs": [-1, 65],
    "target_prompt_logprobs": [integers(1, shape=(1, 1))],
    "prompt_logprobs_last_n": [1],
    "prompt": [[], tokens(), tokens(64), tokens(-1), [RawChunk("image")], tokens(*[1] * 32)],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in WRONG_PARAMS.items() for v in values])
def test_wrong_sampling_parameters_are_named(name: str, value: Any) -> None:
    with pytest.raises(UserError, match=name):
        check_sampling(sample("s", sampling_params={name: value}), LIMITS, SETTINGS)


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in WRONG_FIELDS.items() for v in values])
def test_wrong_fields_of_sampling_requests_are_named(name: str, value: Any) -> None:
    with pytest.raises(UserError, match=name):
        check_sampling(sample("s", **{name: value}), LIMITS, SETTINGS)


def test_the_last_scored_tokens_are_within_the_prompt() -> None:
    for last in (0, 2, -1):
        with pytest.raises(UserError, match="prompt_logprobs_last_n"):
            check_sampling(sample("s", prompt_logprobs=True, prompt_logprobs_last_n=last), LIMITS, SETTINGS)
    check_sampling(sample("s", prompt_logprobs=True, prompt_logprobs_last_n=1), LIMITS, SETTINGS)


def test_a_prompt_that_fills_the_context_can_be_scored() -> None:
    """Clients score a prompt by asking for one token. An answer that ended with the context has no room for it."""
    params = {"max_tokens": 1}
    full = {"prompt": tokens(*[1] * 32), "sampling_params": params}
    assert check_sampling(sample("s", prompt_logprobs=True, **full), LIMITS, SETTINGS).max_tokens == 0
    assert check_sampling(sample("s", topk_prompt_logprobs=2, **full), LIMITS, SETTINGS).max_tokens == 0
    # Nothing else is scored only.
    shorter = sample("s", prompt=tokens(*[1] * 31), sampling_params=params, prompt_logprobs=True)
    assert check_sampling(shorter, LIMITS, SETTINGS).max_tokens == 1
    for wrong in ({**full, "sampling_params": {"max_tokens": 2}}, {**full, "prompt": tokens(*[1] * 33)}):
        with pytest.raises(UserError, match="together at most 32"):
            check_sampling(sample("s", prompt_logprobs=True, **wrong), LIMITS, SETTINGS)


def test_metadata_is_a_bounded_json_object() -> None:
    assert check_metadata({"a": [1, None]}) == {"a": [1, None]}
    for value in ([1], "x", {"a": float("nan")}, {"a": b"x"}, {"a": "x" * 2**19}):
        with pytest.raises(UserError, match="user_metadata"):
            check_metadata(value)
