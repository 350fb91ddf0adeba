"""Pictures of shapes, the question how many there are, and a tiny model with a vision tower that begins with random weights."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2VLImageProcessorPil

from areal.chat import Chat, Pictures

COUNTS = ("one", "two", "three", "four")
"""Answers, by the number of shapes."""

_CELLS, _CELL = 4, 8
_WORDS = ("<|end|>", "<|image|>", "<|user|>", "<|assistant|>", "How", "many", "shapes", "?", *COUNTS)
_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|> {% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|image|>{% else %}{{ part.text }}{% endif %} {% endfor %}{% endif %} <|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)


def draw(count: int, rng: random.Random) -> Image.Image:
    """Return a picture of 32 x 32 pixels with so many squares, discs and triangles, each in a cell of its own."""
    picture = Image.new("RGB", (_CELLS * _CELL, _CELLS * _CELL), (16, 16, 16))
    canvas = ImageDraw.Draw(picture)
    for cell in rng.sample(range(_CELLS**2), count):
        x, y = _CELL * (cell % _CELLS) + rng.randint(0, 2), _CELL * (cell // _CELLS) + rng.randint(0, 2)
        size = rng.randint(3, 5)
        colour = tuple(rng.randint(96, 255) for _ in range(3))
        box = (x, y, x + size, y + size)
        shape = rng.choice(("square", "disc", "triangle"))
        if shape == "square":
            canvas.rectangle(box, fill=colour)
        elif shape == "disc":
            canvas.ellipse(box, fill=colour)
        else:
            canvas.polygon([(x, y + size), (x + size, y + size), (x + size // 2, y)], fill=colour)
    return picture


def conversation(count: int, rng: random.Random) -> list[dict[str, Any]]:
    """Return a question about a picture, with its answer."""
    parts = [{"type": "image", "image": draw(count, rng)}, {"type": "text", "text": "How many shapes ?"}]
    return [{"role": "user", "content": parts}, {"role": "assistant", "content": COUNTS[count - 1]}]


def chat() -> Chat:
    """Return the rendering of messages to tokens and patches."""
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(_WORDS)}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": [word for word in _WORDS if word.startswith("<|")]})
    tokenizer.chat_template = _TEMPLATE
    processor = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, size={"shortest_edge": 64, "longest_edge": 4096})
    return Chat(tokenizer, pictures=Pictures(processor, _WORDS.index("<|image|>")))


def write_model(folder: Path) -> str:
    """Write the configuration of the model. Returns its directory."""
    text = {
        "vocab_size": 16,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    vision = {
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "depth": 2,
        "hidden_size": 48,
        "out_hidden_size": 64,
        "num_heads": 2,
        "intermediate_size": 96,
        "window_size": 16,
        "fullatt_block_indexes": [1],
    }
    image = _WORDS.index("<|image|>")
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, image_token_id=image, video_token_id=15)
    config.vision_start_token_id, config.vision_end_token_id = 14, 13
    config.architectures = ["Qwen2_5_VLForConditionalGeneration"]
    config.save_pretrained(folder)
    return str(folder)
