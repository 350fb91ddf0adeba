"""Errors that every rank must raise, promptly and with the same text."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from areal.tests.harness.limits import PROMPTLY, promptly
from areal.tests.harness.world import world
from areal.utils.distributed import EngineLostError

DESTROY = dist.destroy_process_group
"""The function itself, where a test counts calls."""


def everywhere(value: Any) -> list[Any]:
    """Gather a value over the default process group, which no engine closes."""
    values = [value] * world().size
    if world().size > 1:
        dist.all_gather_object(values, value)
    return values


def raised(call: Callable[[], Any], kind: type[Exception] = EngineLostError, limit: float = PROMPTLY) -> str:
    """Return the error of a call, which every rank must raise within ``limit`` seconds with the same text."""
    # A separate group with a short limit: without the error, the other rank may wait in the call for ever.
    try:
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=limit + 1)) if world().size > 1 else None
    except dist.DistStoreError as error:
        raise AssertionError("the other rank does not reach this call") from error
    with promptly(limit), pytest.raises((RuntimeError, ValueError)) as caught:
        call()
    text = str(caught.value)
    texts = [("", "")] * world().size if group else [(type(caught.value).__name__, text)]
    if group:
        try:
            dist.all_gather_object(texts, (type(caught.value).__name__, text), group=group)
        except RuntimeError as error:
            raise AssertionError(f"the other rank does not raise: {text}") from error
        DESTROY(group)
    assert texts == [(kind.__name__, text)] * world().size
    return text
