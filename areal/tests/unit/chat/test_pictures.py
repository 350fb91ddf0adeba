"""Messages with pictures: their tokens, and the images of samples and conversations."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import Gemma3ImageProcessorPil, Gemma3Processor, Qwen2VLImageProcessorPil

from areal.chat import Chat, ParsedAnswer, Pictures
from areal.inference.protocol import Sampling
from areal.tests.unit.chat.agents import Scripted, sampled
from areal.tests.unit.chat.templates import CHATML
from areal.tests.unit.chat.tokenizers import chat_tokenizer
from areal.trainer.rollout import SingleTurn
from areal.trainer.rollout.environment_episode import EnvironmentEpisode, Step
from areal.trainer.rollout.sequence import Sequence
from areal.utils.data.image_prompt import ImagePrompt, prompt_images
from areal.utils.data.images import BatchImages, PatchRules, SquareRules

VISUAL = CHATML.replace(
    "{{ m.content }}",
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}",
)
SMALL, WIDE = Image.new("RGB", (16, 16), "red"), Image.new("RGB", (32, 16), "blue")


def picture(image: Image.Image) -> dict[str, object]:
    return {"type": "image", "image": image}


def visual_chat() -> tuple[Chat, int]:
    tokenizer = chat_tokenizer(VISUAL)
    token = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    processor = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, size={"shortest_edge": 64, "longest_edge": 784})
    return Chat(tokenizer, pictures=Pictures(processor, token)), token


MESSAGES = [
    {"role": "user", "content": [picture(WIDE), {"type": "text", "text": "and"}, picture(SMALL)]},
    {"role": "assistant", "content": "two"},
]


def test_a_sample_has_a_token_for_each_part_of_its_pictures() -> None:
    chat, token = visual_chat()
    sample = chat.sample(MESSAGES)
    assert sample["image_grid_thw"].tolist() == [[1, 4, 8], [1, 4, 4]]
    assert (sample["input_ids"] == token).sum() == 8 + 4
    # What an engine checks.
    images = BatchImages.of(
        [sample["input_ids"]],
        {key: [sample[key]] for key in ("pixel_values", "image_grid_thw")},
        PatchRules(token, 2, sample["pixel_values"].shape[1]),
    )
    assert images.n_tokens(0) == 12
    # The answer and its end are trained, at the positions before them.
    trained = sample["input_ids"].roll(-1)[sample["loss_mask"] > 0]
    assert chat.template.tokenizer.decode(trained) == "two<|im_end|>"
    prompt = chat.prompt(MESSAGES[:1])
    assert sample["input_ids"][: len(prompt)].tolist() == prompt


GEMMA = (
    "<bos>{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<start_of_image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    "{# <image_soft_token|> <end_of_image> #}"
)


def gemma_chat() -> tuple[Chat, Gemma3Processor]:
    tokenizer = chat_tokenizer(GEMMA)
    for name, token in (("boi", "<start_of_image>"), ("eoi", "<end_of_image>"), ("image", "<image_soft_token|>")):
        setattr(tokenizer, f"{name}_token", token)
        setattr(tokenizer, f"{name}_token_id", tokenizer.convert_tokens_to_ids(token))
    processor = Gemma3ImageProcessorPil(size={"height": 28, "width": 28})
    both = Gemma3Processor(processor, tokenizer, image_seq_length=4)
    return Chat(tokenizer, pictures=Pictures.of_one_size(processor, tokenizer, 4)), both


def test_pictures_of_one_size_are_those_of_gemma() -> None:
    chat, both = gemma_chat()
    text = both.tokenizer.apply_chat_template(MESSAGES, tokenize=False)
    expected = both(text=[text], images=[[WIDE, SMALL]], return_tensors="pt", add_special_tokens=False)
    sample = chat.sample(MESSAGES)
    assert torch.equal(sample["input_ids"], expected["input_ids"][0])
    assert torch.equal(sample["pixel_values"], expected["pixel_values"])
    token = both.tokenizer.image_token_id
    images = BatchImages.of(
        [sample["input_ids"]], {"pixel_values": [sample["pixel_values"]]}, SquareRules(token, 4, (3, 28, 28))
    )
    assert images.n_tokens(0) == 8
    assert both.tokenizer.decode(sample["input_ids"].roll(-1)[sample["loss_mask"] > 0]) == "two<end_of_turn>"


def test_a_conversation_goes_on_with_pictures_of_one_size() -> None:
    chat, both = gemma_chat()
    talk = chat.start(MESSAGES[:1])
    talk.answer(sampled([*chat.template.ids("two"), *chat.stop_token_ids[:1]]))
    talk.add({"role": "user", "content": [picture(SMALL)]})
    again = [*MESSAGES, {"role": "user", "content": [picture(SMALL)]}]
    assert talk.tokens == chat.prompt(again)
    assert talk.tokens.count(both.tokenizer.image_token_id) == 12
    assert talk.images["pixel_values"].shape == (3, 3, 28, 28)
    with pytest.raises(ValueError, match=r"renders 12 tokens .* for 2 pictures"):
        chat.prompt([*MESSAGES[:1], {"role": "user", "content": "<start_of_image>"}])
    with pytest.raises(ValueError, match="has no boi_token"):
        Pictures.of_one_size(both.image_processor, chat_tokenizer(GEMMA), 4)


def test_a_conversation_goes_on_with_pictures() -> None:
    chat, token = visual_chat()
    talk = chat.start(MESSAGES[:1])
    answer = [*chat.template.ids("two"), *chat.stop_token_ids[:1]]
    talk.answer(sampled(answer))
    talk.add({"role": "user", "content": [picture(SMALL)]})
    again = [*MESSAGES[:1], {"role": "assistant", "content": "two"}, {"role": "user", "content": [picture(SMALL)]}]
    assert talk.tokens == chat.prompt(again)
    assert talk.tokens.count(token) == 8 + 4 + 4
    assert talk.images["image_grid_thw"].tolist() == [[1, 4, 8], [1, 4, 4], [1, 4, 4]]
    # Clients of rollouts get both.
    asked = talk.prompt
    assert isinstance(asked, ImagePrompt)
    assert list(asked.tokens) == talk.tokens
    assert torch.equal(asked.images["pixel_values"], chat.images(again)["pixel_values"])
    # A sequence of reinforcement learning has them, also after a checkpoint.
    made = Sequence(talk.segments, 1.0, images=talk.images)
    for sequence in (made, Sequence.of_state(made.state())):
        assert torch.equal(sequence.sample()["pixel_values"], talk.images["pixel_values"])


class Gallery:
    """Shows another picture after the first answer."""

    def reset(self, item: int) -> list[dict[str, Any]]:
        return MESSAGES[:1]

    def step(self, answer: ParsedAnswer) -> Step:
        return Step([{"role": "user", "content": [picture(SMALL)]}], reward=1.0, done=answer.content == "end")


def test_episodes_send_and_keep_pictures() -> None:
    chat, token = visual_chat()
    client = Scripted(*([*chat.template.ids(text), *chat.stop_token_ids[:1]] for text in ("two", "end")))
    episode = EnvironmentEpisode(chat, Gallery, Sampling(max_new_tokens=8))
    (played,) = asyncio.run(episode.run(client, 0))
    single = SingleTurn(lambda item: chat.rollout_prompt(MESSAGES[:1]), lambda item, answer: 1.0, Sampling())
    (answered,) = asyncio.run(single.run(client, 0))
    for sequence, grids in ((played, [[1, 4, 8], [1, 4, 4], [1, 4, 4]]), (answered, [[1, 4, 8], [1, 4, 4]])):
        sample = sequence.sample()
        assert sample["image_grid_thw"].tolist() == grids
        assert (sample["input_ids"] == token).sum() == sum(h * w // 4 for _, h, w in grids)
    sent = [prompt_images(prompt)["image_grid_thw"].tolist() for prompt, _ in client.requests]
    assert sent == [[[1, 4, 8], [1, 4, 4]], [[1, 4, 8], [1, 4, 4], [1, 4, 4]], [[1, 4, 8], [1, 4, 4]]]
    episode.close()
    single.close()


def test_pictures_that_cannot_be_read_are_named() -> None:
    chat, _ = visual_chat()
    blind = Chat(chat_tokenizer(VISUAL))
    for call in (blind.prompt, blind.sample):
        with pytest.raises(ValueError, match=r"messages has a picture.*pass pictures="):
            call(MESSAGES)
    url = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://x"}}]}]
    with pytest.raises(ValueError, match=r"messages\[0\] has a part of the type 'image_url'"):
        chat.prompt(url)
    with pytest.raises(ValueError, match="the image processor refuses a picture"):
        chat.prompt([{"role": "user", "content": [{"type": "image", "image": 3}]}])
    text = [{"role": "user", "content": [picture(SMALL), {"type": "text", "text": "<|image_pad|>"}]}]
    with pytest.raises(ValueError, match=r"renders 2 tokens .* for 1 pictures"):
        chat.prompt(text)
