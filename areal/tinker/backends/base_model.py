"""Facts about the base model: its context length, and a fingerprint of its weights."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from areal.engine.model.hub import model_folder, read_config

_SAMPLED_BYTES = 64 * 2**10


@dataclass(frozen=True)
class BaseModel:
    """The base model of a backend.

    Attributes:
        name: directory or hub name.
        folder: directory of its files.
        fingerprint: hash of its weights: of the size of each file, and of bytes at its beginning, middle and end.
    """

    name: str
    folder: Path
    fingerprint: str

    @classmethod
    def of(cls, name: str) -> BaseModel:
        """Find a base model, which may download it.

        Raises:
            ValueError: there is no such model.
        """
        folder = model_folder(name)
        digest = hashlib.sha256()
        for file in sorted(folder.glob("*.safetensors")):
            size = file.stat().st_size
            digest.update(f"{file.name} {size}".encode())
            with open(file, "rb") as stream:
                for start in sorted({0, max(0, size // 2), max(0, size - _SAMPLED_BYTES)}):
                    stream.seek(start)
                    digest.update(stream.read(_SAMPLED_BYTES))
        return cls(name, folder, digest.hexdigest())

    def max_tokens(self, limit: int | None) -> int:
        """Return the most tokens of one sample: the limit of the operator, or else the context length of the model.

        Raises:
            ValueError: the limit exceeds the context length, or there is neither.
        """
        config = read_config(str(self.folder)).get_text_config()
        context = getattr(config, "max_position_embeddings", None)
        if limit is not None and context is not None and limit > context:
            raise ValueError(
                f"backend_config.max_tokens = {limit}: the model has a context of {context} tokens: lower it, or leave it out"
            )
        length = limit or context
        if length is None:
            raise ValueError(
                f"backend_config.max_tokens = None: the configuration of {self.name} states no context length: set it"
            )
        return length
