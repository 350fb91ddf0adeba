"""Parts that all recipes make from their settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoImageProcessor, AutoTokenizer, PreTrainedTokenizerBase

from areal.chat import Chat, Pictures
from areal.engine.model.hub import read_config
from areal.engine.model.media import image_rules
from areal.recipes.config import RunConfig
from areal.recipes.data.formats import check_rows
from areal.recipes.data.rows import DataRows, read_rows, split_rows
from areal.recipes.data.text import Text
from areal.recipes.record.progress import Results
from areal.trainer.checkpoints import Checkpoints
from areal.utils.data.images import SquareRules


def own_rows(config: RunConfig, kind: str, dataset: Any, evaluation: Any) -> tuple[DataRows, DataRows | None]:
    """Return the rows to train on and those for evaluation, all checked.

    Args:
        config: settings of the run.
        kind: format of the rows; see :func:`~areal.recipes.data.formats.check_rows`.
        dataset: rows; ``None`` reads ``config.dataset``.
        evaluation: rows; ``None`` reads ``config.evaluation``, or takes ``config.held_out`` rows.

    Raises:
        ValueError: there is no data set; a row is not understood; more rows are held out than there are, or rows for evaluation are there, too.
    """
    source = config.dataset if dataset is None else dataset
    if source is None:
        raise ValueError("dataset = None: name a file, or pass rows")
    rows = _read(config, kind, source)
    held_out = config.evaluation if evaluation is None else evaluation
    if held_out is not None and config.held_out:
        raise ValueError(
            f"held_out = {config.held_out} with rows for evaluation: both are evaluated on; leave one of them out"
        )
    if held_out is not None:
        return rows, _read(config, kind, held_out)
    if not config.held_out:
        return rows, None
    return split_rows(rows, config.held_out, config.seed)


def _read(config: RunConfig, kind: str, source: Any) -> DataRows:
    rows = read_rows(source)
    rows = rows.renamed(config.columns) if config.columns else rows
    check_rows(rows, kind, config.system)
    return rows


def tokenizer_of(config: RunConfig) -> PreTrainedTokenizerBase:
    """Return the tokenizer of the model, with the template of ``config.chat_template``.

    Raises:
        ValueError: there is no model or no tokenizer, or the file of the template does not exist.
    """
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(config.model)
    except (OSError, ValueError) as error:
        raise ValueError(f"model = {config.model!r}: no tokenizer can be read there: {error}") from error
    if config.chat_template is not None:
        path = Path(config.chat_template)
        if not path.is_file():
            raise ValueError(f"chat_template = {config.chat_template!r}: there is no such file")
        tokenizer.chat_template = path.read_text()
    return tokenizer


def renderer(config: RunConfig, tokenizer: PreTrainedTokenizerBase, tools: tuple[Any, ...] = ()) -> Chat | Text:
    """Return what turns messages into tokens: the chat template, or plain text.

    Raises:
        ValueError: the tokenizer has no chat template, or it does not support the tools.
    """
    if config.text:
        return Text(tokenizer)
    if tokenizer.chat_template is None:
        raise ValueError(
            f"model = {config.model!r}: its tokenizer has no chat template: set chat_template to a file, or text = true for a base model"
        )
    return Chat(tokenizer, tools, pictures=_pictures(config.model, tokenizer), **config.template_options)


def _pictures(model: str, tokenizer: PreTrainedTokenizerBase) -> Pictures | None:
    """Return what reads the pictures of messages; ``None`` for a model of text."""
    hf = read_config(model)
    rules = image_rules(hf, text_only=False)
    if rules is None:
        return None
    try:
        processor = AutoImageProcessor.from_pretrained(model)
        if isinstance(rules, SquareRules):
            return Pictures.of_one_size(processor, tokenizer, rules.n_tokens)
        return Pictures(processor, hf.image_token_id)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"model = {model!r}: it takes images, and no image processor can be read there: {error}"
        ) from error


def decoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[Sequence[int]], str]:
    """Return a function from token ids to text, with special tokens."""
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def checkpoints_of(config: RunConfig, results: Results) -> Checkpoints:
    """Return the schedule of checkpoints. Results of evaluations are part of them."""
    return Checkpoints(
        config.output / "checkpoints",
        every=config.checkpoint_every,
        keep_last=config.keep_checkpoints,
        stateful={"results": results},
    )
