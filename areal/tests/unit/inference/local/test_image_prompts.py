"""Prompts with images on a replica: answers and log-probs are those of transformers, whatever else is generated."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from areal.inference.local.prompt_images import EncodedImages, ImageReader
from areal.inference.local.rollout import LocalRollout
from areal.inference.protocol import checked_prompt
from areal.tests.grid.models import tiny_model
from areal.tests.grid.vision_models import GRID_FAMILIES, VISION_FAMILIES, square_images, tokens
from areal.tests.unit.inference.local.image_prompts import FIRST, PROMPTS, rarely_drawing, whole_logprobs
from areal.tests.unit.inference.local.rollouts import CONTEXT, assert_logprobs, endless, model, run, run_in_step
from areal.utils.data.image_prompt import ImagePrompt, Prompt
from areal.utils.data.images import GRID
from areal.weight_sync.apply import ModuleSource

FAMILIES = [name for name in GRID_FAMILIES if not name.startswith("qwen3_5")]


def replica(family: str = "qwen2_5_vl", seed: int = 0) -> PreTrainedModel:
    return rarely_drawing(tiny_model(VISION_FAMILIES[family](), seed).eval())


def rollout(made: PreTrainedModel, **options: Any) -> LocalRollout:
    return LocalRollout(made, **{"max_context": CONTEXT, "max_requests": 24, **options})


@pytest.mark.parametrize(
    ("family", "options"),
    [
        *((family, {}) for family in FAMILIES),
        ("qwen3_vl", {"max_batch_tokens": 24, "page_size": 4}),
        ("qwen2_5_vl", {"max_requests": 2}),
        ("qwen2_5_vl", {"cache_tokens": CONTEXT, "page_size": 4}),
    ],
    ids=[*FAMILIES, "split-prompts", "few-at-once", "full-cache"],
)
def test_answers_see_the_images_of_their_prompt(family: str, options: dict[str, Any]) -> None:
    made = replica(family)
    with rollout(made, **options) as engine:
        asked = [engine.generate(each, endless(16, seed=i)) for i, each in enumerate([*PROMPTS, *PROMPTS])]
        answers = run(*asked)
    for given, answer in zip([*PROMPTS, *PROMPTS], answers, strict=True):
        assert_logprobs(answer, whole_logprobs(made, given, answer))


def test_prompt_is_shared_by_requests_with_the_same_images_only() -> None:
    made, seen = replica(), []
    tower = made.model.visual.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    with rollout(made) as engine:
        counts = []
        made.register_forward_pre_hook(
            lambda _, args, kwargs: counts.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
        run_in_step(engine, *(engine.generate(FIRST, endless(2, seed=i)) for i in range(4)))
        first, encoded = sum(counts), list(seen)
        counts.clear()
        run(engine.generate(PROMPTS[1], endless(2, seed=9)))
    tower.remove()
    # One prompt, three times the tokens of its last page, and an answer's token for each.
    length = len(FIRST.tokens)
    assert first == length + 3 * (length - (length - 1) // 16 * 16) + 4
    assert sum(counts) == length + 1
    assert encoded == [len(FIRST.images["pixel_values"])]


def test_images_are_encoded_by_the_weights_of_an_update() -> None:
    made = replica()
    with rollout(made) as engine:
        run(engine.generate(FIRST, endless(4, seed=0)))
        kept = engine._images.read(FIRST)  # as a request that still waits has it
        assert kept is not None
        kept.encoded.features(made)
        engine.update(ModuleSource(replica(seed=1)).named_tensors(), version=1)
        (answer,) = run(engine.generate(FIRST, endless(4, seed=0)))
    assert set(answer.versions) == {1}
    assert_logprobs(answer, whole_logprobs(replica(seed=1), FIRST, answer))


def test_images_may_be_read_while_an_update_forgets_them() -> None:
    """Another thread reads requests, and a dictionary must not grow within a loop over it."""
    reader = ImageReader(replica())
    held, threads = [reader.read(each) for each in PROMPTS[:2]], []

    class Interrupted(weakref.WeakValueDictionary[bytes, EncodedImages]):
        def values(self) -> Iterator[EncodedImages]:  # type: ignore[override]
            for each in super().values():
                threads.append(threading.Thread(target=lambda: held.append(reader.read(PROMPTS[2]))))
                threads[-1].start()
                threads[-1].join(0.2)
                yield each

    reader._known = Interrupted(reader._known)
    reader.forget()
    for thread in threads:
        thread.join(60)
    assert len(held) == 4
    assert len(reader._known) == 3


def test_an_answer_with_the_token_of_an_image_fails_alone() -> None:
    made = replica()
    with torch.no_grad():
        # All tokens are equally likely.
        made.get_output_embeddings().weight[:] = 0
    with rollout(made) as engine:
        wanted = endless(1, temperature=0.0)
        failed = [engine.generate([5, 6], endless(1, seed=seed)) for seed in range(300)]
        results = run(*(_caught(each) for each in failed), engine.generate(FIRST, wanted))
    refused = [each for each in results if isinstance(each, RuntimeError)]
    assert 0 < len(refused) < 60
    assert all("which stands for an image, a video or sound" in str(each) for each in refused)


async def _caught(work: Any) -> Any:
    try:
        return await work
    except RuntimeError as error:
        return error


def test_images_that_do_not_fit_are_named() -> None:
    cut = {**FIRST.images, GRID: FIRST.images[GRID][:1]}
    wrong: list[tuple[Prompt, str]] = [
        (FIRST.tokens, r"runs of \[8, 4\] of the token 100, .* has images of \[\] tokens"),
        (ImagePrompt(FIRST.tokens, cut), r"pixel_values of sample 0 .* its image_grid_thw needs"),
        (ImagePrompt(FIRST.tokens[:-8], FIRST.images), r"has runs of \[8\]|has runs of \[8, \d\]"),
    ]
    with rollout(replica()) as engine:
        for given, message in wrong:
            with pytest.raises(ValueError, match=message):
                run(engine.generate(given, endless(1)))
        with pytest.raises(ValueError, match="has images, and this request sends tokens alone"):
            run(engine.prompt_logprobs(FIRST, endless(1)))  # type: ignore[arg-type]


def test_models_that_cannot_compute_images_are_named() -> None:
    squares = ImagePrompt(tuple(tokens(3, (1, 4, 4), seed=0).tolist()), square_images(1, seed=0))
    with rollout(replica("gemma3")) as engine, pytest.raises(ValueError, match="'gemma3' see each other in both"):
        run(engine.generate(squares, endless(1)))
    with rollout(model()) as engine, pytest.raises(ValueError, match=r"'qwen3' takes none: choose one of gemma3"):
        run(engine.generate(ImagePrompt((1, 2), FIRST.images), endless(1)))
    with pytest.raises(ValueError, match="has images, and this request sends tokens alone"):
        checked_prompt(FIRST)
