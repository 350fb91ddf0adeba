"""Critics and reward models in the form of other libraries: classifiers of transformers with one label.

Their one row, ``score``, is the value head. They have no output head: it is zero in an engine, and not saved.
"""

from __future__ import annotations

from torch import Tensor, nn
from transformers import PretrainedConfig

TOKENS, SEQUENCES = "ForTokenClassification", "ForSequenceClassification"
"""Ends of the names of their classes. The row of the first has a bias."""

VALUE_WEIGHT, VALUE_BIAS = "value_head.weight", "value_head.bias"
VALUE_HEAD = frozenset((VALUE_WEIGHT, VALUE_BIAS))
"""Names of the value head in an engine."""

SCORE = {VALUE_WEIGHT: "score.weight", VALUE_BIAS: "score.bias"}
"""Names of the value head in the files of a classifier."""

NO_HEAD = "lm_head.weight"
"""The output head, which their files lack."""


def classifier_class(config: PretrainedConfig) -> str | None:
    """Return the class of a model that is stored as a classifier; ``None`` for other models."""
    names = config.architectures or ()
    return next((name for name in names if name.endswith((TOKENS, SEQUENCES))), None)


def make_value_head(config: PretrainedConfig, width: int, like: Tensor) -> nn.Linear:
    """Return a value head, with the dtype and on the device of another weight.

    Args:
        config: configuration of the model.
        width: size of a hidden state.
        like: the other weight.
    """
    return nn.Linear(width, 1, bias=value_bias(config), device=like.device, dtype=like.dtype)


def value_bias(config: PretrainedConfig) -> bool:
    """Return whether the value head has a bias."""
    return (classifier_class(config) or "").endswith(TOKENS)


def check_classifier(path: str, config: PretrainedConfig, *, value_head: bool) -> None:
    """Check that a classifier is one that an engine can train: the value head has one row.

    Raises:
        ValueError: it has several labels, or the engine is without a value head.
    """
    name = classifier_class(config)
    if name is None:
        return
    if not value_head:
        raise ValueError(
            f"path = {path!r} is a {name}, which has no output head: set value_head = True to train it as a critic or a reward model"
        )
    if config.num_labels != 1:
        raise ValueError(
            f"path = {path!r} is a {name} with num_labels = {config.num_labels}, and a value head has one row: name a model with num_labels = 1"
        )
