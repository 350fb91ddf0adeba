"""Options of other frameworks that an adapter does not support."""

from __future__ import annotations

import pytest

from areal.integrations.options import check_options


def test_unsupported_value_is_named() -> None:
    supported = {"model.dtype": ("bf16", {"bf16": 1, "fp32": 2}), "model.names": (None, [None])}
    check_options(supported, "engine = 'x'", "leave it out")
    with pytest.raises(
        ValueError, match=r"model\.names = \['a'\] with engine = 'x', which supports None: leave it out"
    ):
        check_options({**supported, "model.names": (["a"], [None])}, "engine = 'x'", "leave it out")
    with pytest.raises(
        ValueError, match=r"dtype = 'fp8' with engine = 'x', which supports 'bf16' or 'fp32': change it"
    ):
        check_options({**supported, "model.dtype": ("fp8", supported["model.dtype"][1])}, "engine = 'x'", "change it")
