"""Results of the ranks on the way to the driver: checked for size, and pickled, before Ray sends them."""

from __future__ import annotations

import dataclasses
from typing import Any

from ray import cloudpickle

from areal.dispatch.wire import Packed, pack_tensors, unpack_tensors


def seal(value: Any, what: str, limit: int) -> Packed:
    """Return the form of a result that is sent: what is not a tensor is pickled here, where its size and errors are known.

    Args:
        value: result of a rank.
        what: name of the result, for errors.
        limit: bytes above which it is not sent.

    Raises:
        ValueError: the result cannot be sent, or is larger than the limit.
    """
    try:
        packed = pack_tensors(value)
        pickled = cloudpickle.dumps(packed.value)
    except Exception as error:
        raise ValueError(
            f"{what} cannot be sent to the driver: {error}: return tensors, numbers, strings, and lists and dicts of these"
        ) from error
    nbytes = packed.nbytes + len(pickled)
    if nbytes > limit:
        raise ValueError(
            f"{what} has {nbytes:,} bytes, and max_result_bytes = {limit:,}: return less, for instance of a smaller batch, or raise "
            "RayWorkers(max_result_bytes=...)"
        )
    return dataclasses.replace(packed, value=pickled)


def unseal(sealed: Packed) -> Any:
    """Return the result, in the driver."""
    return unpack_tensors(dataclasses.replace(sealed, value=cloudpickle.loads(sealed.value)))
