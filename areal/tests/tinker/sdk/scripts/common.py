"""Arguments of a script, clients, and data."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

ARGUMENTS: dict[str, Any] = json.loads(sys.argv[1])
COMPLETE: bool = ARGUMENTS.get("complete", True)
# torch comes from the environment of the tests, behind the packages of the SDK; the SDK looks for it when it is imported.
if COMPLETE:
    sys.path.append(ARGUMENTS["packages"])

import numpy as np  # noqa: E402
import tinker  # noqa: E402
from tinker import types  # noqa: E402

torch: Any = importlib.import_module("torch") if COMPLETE else None

NEW = ARGUMENTS["version"] != "0.24.1"
ADAM = types.AdamParams(learning_rate=1e-2, eps=1e-8)


def service(**flags: Any) -> Any:
    """Return a client. ``flags`` replace those of the server's configuration."""
    holder = tinker.lib.internal_client_holder.InternalClientHolder
    original = holder._fetch_client_config

    async def changed(self: Any, *arguments: Any) -> Any:
        return (await original(self, *arguments)).model_copy(update=flags)

    holder._fetch_client_config = changed
    try:
        client = tinker.ServiceClient()
        config = client.holder._client_config  # fetched when it is first needed
    finally:
        holder._fetch_client_config = original
    assert all(getattr(config, name) == value for name, value in flags.items())
    return client


def trainer(client: Any, **options: Any) -> Any:
    """Return a training client of a small adapter."""
    given = client.create_lora_training_client(**{"base_model": "tiny", "rank": 4, "seed": 7, **options})
    return given.result() if hasattr(given, "result") else given


def resumed(client: Any, path: str, optimizer: bool = True) -> Any:
    """Return a training client of a checkpoint."""
    create = (
        client.create_training_client_from_state_with_optimizer
        if optimizer
        else client.create_training_client_from_state
    )
    given = create(path)
    return given.result() if hasattr(given, "result") else given


def datum(seed: int, length: int, **inputs: Any) -> Any:
    """Return a sample of random tokens, with weights 1 unless other inputs are given."""
    tokens = np.random.default_rng(seed).integers(3, 100, length + 1)
    inputs = inputs or {"weights": np.ones(length, np.float32)}
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1].tolist()),
        loss_fn_inputs={"target_tokens": tokens[1:].astype(np.int64), **inputs},
    )


def logprobs(output: Any) -> list[np.ndarray]:
    """Return the log-probs of each sample."""
    return [np.asarray(item["logprobs"].to_numpy()) for item in output.loss_fn_outputs]


def flat(output: Any) -> np.ndarray:
    """Return the log-probs of all samples."""
    return np.concatenate([array.ravel() for array in logprobs(output)])


def same(actual: Any, expected: Any, tolerance: float = 1e-5) -> None:
    """Compare two arrays."""
    np.testing.assert_allclose(
        np.asarray(actual, np.float64), np.asarray(expected, np.float64), rtol=tolerance, atol=tolerance
    )


def fails(kind: Any, text: str, function: Callable[[], Any]) -> Any:
    """Check that a call fails with an error of a kind, whose message has ``text``, and return the error."""
    try:
        function()
    except kind as error:
        caught = error
    else:
        raise AssertionError(f"no error that says {text!r}")
    assert text.lower() in str(caught).lower(), caught
    return caught


def end(results: dict[str, Any]) -> NoReturn:
    """Print the results, and end the process without finalizing the interpreter.

    A daemon thread of the SDK may wait in C++ code then, where Python below 3.14 aborts the process (CPython gh-87135).
    """
    print(json.dumps(results), flush=True)
    os._exit(0)


__all__ = [
    *("ADAM", "COMPLETE", "NEW", "datum", "end", "fails", "flat", "logprobs", "np", "resumed"),
    *("same", "service", "tinker", "torch", "trainer", "types"),
]
