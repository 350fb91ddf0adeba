"""Check that servers have the model that is trained, whatever its path: its shape, its tokenizer, and the weights of the start."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from areal.api.sections.quantization import QuantizationConfig
from areal.engine.checkpoint.safetensors import TensorFiles
from areal.engine.model.media import image_rules, media_tokens
from areal.inference.http.sent_images import SentImages
from areal.inference.http.server_connection import StatusError, Unavailable
from areal.inference.http.servers.dialect import Ask, ServedModel
from areal.inference.http.servers.http_call import HTTPCall, Tokenize, Tokenized
from areal.inference.http.servers.rounding import served_format, trained_format
from areal.utils.data.image_prompt import ImagePrompt, Prompt, prompt_tokens
from areal.utils.data.images import PatchRules

_SHAPE = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_intermediate_size",
)
"""Fields of a configuration that two copies of a model have in common."""

_TEXT = "Compute 3.14159 × 27:\n\n\tdef f(x): return x**2  # naïve, 日本語, Привет\n"
"""Text that tokenizers are compared on."""

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_SAMPLED_TENSORS, _SAMPLED_VALUES = 8, 4096
_ROUNDING = 2.0**-7
"""Relative difference of a value to its copy in another floating-point format, and more."""


@dataclass(frozen=True)
class _Model:
    """Facts of a model.

    Attributes:
        owner: where it is, for messages.
        path: directory or hub name.
        shape: fields of :data:`_SHAPE`; empty if the configuration cannot be read.
        tokens: token ids of :data:`_TEXT`; ``None`` if unknown.
    """

    owner: str
    path: str | None
    shape: Mapping[str, object]
    tokens: tuple[int, ...] | None


class ModelCheck:
    """The model that all servers of an owner must have.

    Paths do not count. What a server does not tell, and cannot be read from the path that it names, is not compared.

    Args:
        model: directory or hub name of the model; ``None`` compares the servers with each other.
        quantization: rounding of the trainer; ``None`` if it does not round.

    Attributes:
        vocab_size: size of the model's vocabulary, known after the first check; ``None`` if it cannot be read.
    """

    def __init__(self, model: str | None, quantization: QuantizationConfig | None = None) -> None:
        self._model, self._trained = model, trained_format(quantization)
        self._first: _Model | None = None
        self.vocab_size: int | None = None

    @functools.cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """Tokenizer of the model, if it has one that can be read here."""
        if self._model is None:
            return None
        folder = _local_folder(self._model)
        if folder is None or not any((folder / name).is_file() for name in _TOKENIZER_FILES):
            return None
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
        return tokenizer

    async def check(self, url: str, served: ServedModel, ask: Ask, *, start: bool) -> None:
        """Raise if a server has another model or tokenizer.

        Args:
            url: URL of the server.
            served: what it tells of its model.
            ask: sends a request to it.
            start: its weights are those with which it was started, and should be those of the model.

        Raises:
            ValueError: it has, and names both models; or a trainer that rounds would train another model than it serves.
        """
        config = _config_of(served.path)
        self._check_rounding(served_format(served.quantization, getattr(config, "quantization_config", None)))
        theirs = _Model(url, served.path, _shape_of(config), await _tokens_of(ask))
        ours = self._reference(theirs)
        if ours is theirs:
            return
        what = f"it has the model {theirs.path!r}, and {ours.owner} has {ours.path!r}"
        way_out = "start the server with that model, or give the server's by model="
        for name in theirs.shape.keys() & ours.shape.keys():
            if theirs.shape[name] != ours.shape[name]:
                raise ValueError(f"{what}: {name} = {theirs.shape[name]} and {ours.shape[name]}: {way_out}")
        if None not in (theirs.tokens, ours.tokens) and theirs.tokens != ours.tokens:
            raise ValueError(f"{what}: their tokenizers give different tokens for the same text: {way_out}")
        if start and self._model is not None and theirs.path is not None:
            other = _other_weight(theirs.path, self._model)
            if other is not None:
                raise ValueError(f"{what}: their weights differ, such as {other}: {way_out}")

    def _check_rounding(self, served: str | None) -> None:
        """Raise if the trainer rounds to another format than a server. Warn if only the server rounds."""
        if served is None or served == self._trained:
            return
        if self._trained:
            raise ValueError(
                f"the trainer rounds weights to {self._trained}, and the server to {served or 'no format'}: start the server with the same "
                "format, such as vLLM with --quantization fp8_per_channel for fp8; or change fsdp.quantization, or leave it out"
            )
        warnings.warn(
            f"the server rounds weights to {served}, and the trainer does not: their log-probs differ. fsdp.quantization rounds in training, "
            "and HTTPRollout(quantization=) says so",
            stacklevel=2,
        )

    def _reference(self, theirs: _Model) -> _Model:
        """Return the facts that a server's are compared with."""
        if self._model is None:
            # The first one that answers.
            reference = self._first = self._first or theirs
        else:
            tokens = None if theirs.tokens is None else self._tokens
            reference = _Model("HTTPRollout.model", self._model, self._shape, tokens)
        size = reference.shape.get("vocab_size")
        self.vocab_size = size if isinstance(size, int) else None
        return reference

    def images(self, prompt: Prompt) -> SentImages | None:
        """Return the images of a prompt, to send to a server; ``None`` without any.

        Raises:
            ValueError: the model is unknown or takes no such images; or images and tokens do not match.
        """
        given = isinstance(prompt, ImagePrompt)
        config = self._config
        if config is None:
            if given:
                raise ValueError(
                    "the prompt has images: pass model= to HTTPRollout, whose configuration says how they are sent"
                )
            return None
        if not given and getattr(config, "image_token_id", None) not in prompt_tokens(prompt):
            return None
        rules = image_rules(config, text_only=False)
        if not isinstance(rules, PatchRules):
            raise ValueError(
                f"the prompt has images, and those of model_type = {config.model_type!r} are not sent to servers: take Qwen2-VL or one of its "
                "successors"
            )
        return SentImages.of(prompt, rules)

    @functools.cached_property
    def media(self) -> frozenset[int]:
        """Tokens that stand for an image, a video or sound."""
        return frozenset() if self._config is None else media_tokens(self._config, None)

    @functools.cached_property
    def _config(self) -> PretrainedConfig | None:
        return _config_of(self._model)

    @functools.cached_property
    def _shape(self) -> Mapping[str, object]:
        return _shape_of(self._config)

    @functools.cached_property
    def _tokens(self) -> tuple[int, ...] | None:
        return None if self.tokenizer is None else tuple(self.tokenizer.encode(_TEXT, add_special_tokens=False))


async def _tokens_of(ask: Ask) -> tuple[int, ...] | None:
    """Return the tokens that a server makes of :data:`_TEXT`; ``None`` if it does not tell."""
    try:
        reply = await ask(HTTPCall("/tokenize", Tokenize(prompt=_TEXT), Tokenized))
    except StatusError:
        return None  # it has no tokenizer
    except Unavailable as error:
        if error.status is None:
            raise
        return None
    return None if reply is None else tuple(reply.tokens)


def _local_folder(path: str) -> Path | None:
    """Return the directory of a model, or the local download of a hub model; ``None`` if there is neither."""
    if Path(path).is_dir():
        return Path(path)
    try:
        return Path(snapshot_download(path, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError, OSError):
        return None


def _config_of(path: str | None) -> PretrainedConfig | None:
    """Return the configuration of a model; ``None`` if it cannot be read here."""
    folder = None if path is None else _local_folder(path)
    if folder is None or not (folder / "config.json").is_file():
        return None
    try:
        return AutoConfig.from_pretrained(folder)
    except (OSError, ValueError):
        return None


def _shape_of(config: PretrainedConfig | None) -> dict[str, object]:
    """Return the fields of a model's shape; empty without a configuration."""
    text = None if config is None else config.get_text_config()
    return {name: getattr(text, name) for name in _SHAPE if getattr(text, name, None) is not None}


def _other_weight(path: str, other: str) -> str | None:
    """Return the name of a tensor whose values differ in two directories; ``None`` if no such tensor is found.

    Some values of some tensors are compared. Those in another format than 16 or 32 bits are left out.
    """
    folder, reference = _local_folder(path), _local_folder(other)
    if folder is None or reference is None or folder.resolve() == reference.resolve():
        return None
    floating = (torch.float32, torch.float16, torch.bfloat16)
    try:
        with TensorFiles.of_model(folder) as files, TensorFiles.of_model(reference) as others:
            names = [name for name in files if name in others]
            for name in names[:: max(1, len(names) // _SAMPLED_TENSORS)]:
                shape = files.shape(name)
                if shape != others.shape(name):
                    return name
                # The first row.
                index = tuple(slice(0, 1) for _ in shape[:-1]) + tuple(slice(0, _SAMPLED_VALUES) for _ in shape[-1:])
                x, y = files.read(name, index), others.read(name, index)
                if x.dtype in floating and y.dtype in floating:
                    x, y = x.float(), y.float()
                    if not torch.allclose(x, y, rtol=_ROUNDING, atol=1e-6):
                        return name
    except ValueError:
        return None
    return None
