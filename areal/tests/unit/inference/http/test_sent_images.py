"""Images of requests to servers: what vLLM gets, and which servers and models get none."""

from __future__ import annotations

import base64
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
from torch import Tensor

from areal.inference.http.answer import Answer
from areal.inference.http.model_check import ModelCheck
from areal.inference.http.sent_images import SentImages
from areal.inference.http.servers.dialect import Routes, ServedModel
from areal.inference.http.servers.sglang import SGLangRoutes
from areal.inference.http.servers.vllm import VLLMRoutes, VLLMTokenRoutes
from areal.inference.protocol import Sampling
from areal.tests.grid.models import model_dir
from areal.tests.grid.vision_models import IMAGE_TOKEN, VISION_FAMILIES, images, square_images, tokens
from areal.utils.data.image_prompt import ImagePrompt, Prompt

WIDE, SMALL = (1, 4, 8), (1, 4, 4)
PROMPT = ImagePrompt(tuple(tokens(5, WIDE, 4, SMALL, 3, seed=1).tolist()), images(WIDE, SMALL, seed=1))


def checked(folder: Path, family: str = "qwen2_5_vl") -> ModelCheck:
    VISION_FAMILIES[family]().save_pretrained(folder)
    return ModelCheck(str(folder))


def routes(**served: Any) -> VLLMTokenRoutes:
    return VLLMTokenRoutes(None, None, ServedModel(**served), labels=True)


def asked(to: Routes, prompt: ImagePrompt, sent: SentImages | None, version: int = 3) -> dict[str, Any]:
    """Return the body of a request."""
    answer = Answer(list(prompt.tokens), Sampling(max_new_tokens=4), None, sent)
    return answer.request(to, "one", version).body.model_dump(exclude_none=True)


def decoded(text: str) -> dict[str, tuple[Tensor, list[Any]]]:
    """Return the tensors of an image, each with how it is joined to those of others."""
    made = {}
    for name, each in msgpack.unpackb(base64.b64decode(text)).items():
        dtype, shape, data = each["data"]
        made[name] = (torch.frombuffer(bytearray(data.data), dtype=getattr(torch, dtype)).view(shape), each["field"])
    return made


def test_request_has_each_image_with_its_tokens(tmp_path: Path) -> None:
    sent = checked(tmp_path).images(PROMPT)
    body = asked(routes(), PROMPT, sent)
    features = body["features"]
    assert body["token_ids"] == list(PROMPT.tokens)
    assert features["mm_placeholders"]["image"] == [{"offset": 5, "length": 8}, {"offset": 17, "length": 4}]
    assert all(PROMPT.tokens[at : at + n] == (IMAGE_TOKEN,) * n for at, n in ((5, 8), (17, 4)))
    (first, second) = map(decoded, features["kwargs_data"]["image"])
    pixels, grid = PROMPT.images["pixel_values"], PROMPT.images["image_grid_thw"]
    for made, rows, number in ((first, slice(0, 32), 0), (second, slice(32, 48), 1)):
        assert torch.equal(made["pixel_values"][0], pixels[rows])
        assert torch.equal(made["image_grid_thw"][0], grid[number])
        length = len(pixels[rows])
        assert made["pixel_values"][1] == ["flat", {"keep_on_cpu": False, "slices": [[0, length, None]], "dim": 0}]
        assert made["image_grid_thw"][1] == ["batched", {"keep_on_cpu": True}]
    # A prompt of text has none.
    assert "features" not in asked(routes(), ImagePrompt((1, 2, 3), {}), checked(tmp_path).images([1, 2, 3]))


def test_names_of_images_differ_by_pixels_and_weights(tmp_path: Path) -> None:
    """vLLM keeps what it has encoded under the name."""
    check = checked(tmp_path)

    def names(prompt: ImagePrompt, version: int) -> list[str]:
        made: list[str] = asked(routes(), prompt, check.images(prompt), version)["features"]["mm_hashes"]["image"]
        return made

    changed = PROMPT.images["pixel_values"].clone()
    changed[40] = 0
    other = replace(PROMPT, images={**PROMPT.images, "pixel_values": changed})
    first = names(PROMPT, 1)
    assert first == names(PROMPT, 1)
    assert names(other, 1)[0] == first[0]
    assert len({*first, names(other, 1)[1], *names(PROMPT, 2)}) == 5


@pytest.mark.parametrize(
    ("to", "message"),
    [
        (VLLMRoutes(None, None, ServedModel(), labels=True), "start vLLM with --enable-scale-out"),
        (routes(normalizes=True), "would normalise them a second time: start vLLM with --no-mm-device"),
        (SGLangRoutes(None, ServedModel(), weights_backup=True, mask_tokens=1), "this server gets tokens alone"),
    ],
    ids=["completions", "normalizes", "sglang"],
)
def test_servers_that_take_no_images_are_named(to: Routes, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        asked(to, PROMPT, checked(tmp_path).images(PROMPT))


def test_images_that_cannot_be_sent_are_named(tmp_path: Path) -> None:
    squares = ImagePrompt(tuple(tokens(3, SMALL, seed=0).tolist()), square_images(1, seed=0))
    wrong: list[tuple[ModelCheck, Prompt, str]] = [
        (checked(tmp_path / "qwen"), PROMPT.tokens, r"runs of \[8, 4\] of the token 100, .* images of \[\] tokens"),
        (checked(tmp_path / "gemma", "gemma3"), squares, "'gemma3' are not sent to servers: take Qwen2-VL or"),
        (ModelCheck(model_dir("qwen3")), PROMPT, "'qwen3' are not sent to servers"),
        (ModelCheck(None), PROMPT, "pass model= to HTTPRollout"),
    ]
    for check, prompt, message in wrong:
        with pytest.raises(ValueError, match=message):
            check.images(prompt)
    assert ModelCheck(None).images([1, IMAGE_TOKEN]) is None
