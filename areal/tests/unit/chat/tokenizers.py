"""Tokenizers of single characters with a given chat template and its special tokens."""

from __future__ import annotations

import re

from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

SPECIAL = re.compile(
    r"<\|[^|<>\s]{1,40}\|?>|<｜[^｜<>]{1,40}｜>|<[a-z_]+\|>|<(?:start|end)_of_[a-z]+>|<end>|\[/?[A-Z_]{2,20}\]"
)


def chat_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a chat template. A special token of the template is one token, and every other character is one."""
    eos = "</s>" if "</s>" in template else "<eos>"
    specials = sorted({*SPECIAL.findall(template), eos, "<bos>"})
    characters = [chr(code) for code in range(32, 127)] + ["\n", "\t"] + sorted({c for c in template if ord(c) > 126})
    vocabulary = {token: number for number, token in enumerate([*specials, *characters])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=eos, bos_token="<bos>")
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [each for each in specials if each not in (eos, "<bos>")]}
    )
    tokenizer.chat_template = template
    return tokenizer
