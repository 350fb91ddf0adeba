"""Experts of tokens in the replies of servers."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

_MISSING = "{} is missing: start the server with --enable-return-routed-experts, and leave the option out for a model without experts"


def of_npy(text: str | None, where: str) -> Tensor:
    """Return the experts in a reply of vLLM: ``[tokens, layers, experts per token]``, int32.

    Args:
        text: base64 of a ``.npy`` file.
        where: name of the field.

    Raises:
        ValueError: it is missing, or has another form.
    """
    array = _decoded(text, where, "a .npy file", lambda content: np.load(io.BytesIO(content), allow_pickle=False))
    if array.ndim != 3 or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(
            f"{where} is {array.dtype} {list(array.shape)}: expected integers [tokens, layers, experts per token]"
        )
    return torch.from_numpy(array.astype(np.int32))


def of_int32(text: str | None, tokens: int, per_token: int, where: str) -> Tensor:
    """Return the experts in a reply of SGLang: ``[tokens, layers, per_token]``, int32.

    Args:
        text: base64 of numbers of 32 bits.
        tokens: number of tokens that the reply must have.
        per_token: experts of a token.
        where: name of the field.

    Raises:
        ValueError: it is missing, or has another size.
    """
    numbers = _decoded(text, where, "numbers of 32 bits", lambda content: np.frombuffer(content, dtype="<i4"))
    if not len(numbers) or len(numbers) % (tokens * per_token):
        raise ValueError(
            f"{where} has {len(numbers)} numbers: expected a multiple of {tokens} tokens x {per_token} experts"
        )
    return torch.from_numpy(numbers.astype(np.int32)).view(tokens, -1, per_token)


def _decoded(text: str | None, where: str, form: str, read: Callable[[bytes], np.ndarray]) -> np.ndarray:
    """Return the array that ``read`` makes of the bytes in a reply.

    Raises:
        ValueError: they are missing, or not of this form.
    """
    if text is None:
        raise ValueError(_MISSING.format(where))
    try:
        return read(base64.b64decode(text, validate=True))
    except (binascii.Error, ValueError, EOFError) as error:
        raise ValueError(f"{where} is no base64 of {form}: {error}") from error
