"""A tokenizer that needs no download."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

OPEN, CLOSE, UNKNOWN = "<|im_start|>", "<|im_end|>", "<unk>"


TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def character_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per printable character and a chat template."""
    characters = [chr(c) for c in range(32, 127)] + ["\n"]
    vocab = {token: i for i, token in enumerate([UNKNOWN, OPEN, CLOSE, *characters])}
    core = Tokenizer(models.WordLevel(vocab, unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token=UNKNOWN, bos_token=OPEN, eos_token=CLOSE, pad_token=CLOSE
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer
