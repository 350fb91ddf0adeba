"""How many tokens a prompt has together with its answers, and what a replica holds of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from areal.engine.model.hub import max_positions, read_config
from areal.recipes.policy_config import PolicyConfig
from areal.utils.data.image_prompt import Prompt, prompt_tokens

_UNKNOWN = 32768
"""Most tokens of ``max_context``, and of a replica's cache, if only the episodes know their length."""


def model_context(config: PolicyConfig) -> int:
    """Return the number of tokens for which the model was made; a large number if it is not known.

    Raises:
        ValueError: ``max_context`` is larger.
    """
    context = max_positions(read_config(config.model)) or 10**9
    if (config.max_context or 0) > context:
        raise ValueError(f"max_context = {config.max_context}: the model's context is {context}; lower the number")
    return context


def needed_context(config: PolicyConfig, prompts: Iterable[Prompt], *, tools: bool) -> int:
    """Return the maximum number of tokens of a prompt with its answers.

    Args:
        config: settings of the run.
        prompts: all prompts.
        tools: whether answers may call tools, whose results need room as well.

    Raises:
        ValueError: ``max_context`` or the model's context is too short.
    """
    context = model_context(config)
    prompt = max(len(prompt_tokens(each)) for each in prompts)
    limit = config.max_context or context
    why = f"max_context is {limit}: raise it," if config.max_context else f"the model's context is {context}:"
    most = config.max_episode_tokens or 10**9
    answer, name = min((config.max_new_tokens, "max_new_tokens"), (most, "max_episode_tokens"))
    if (needed := prompt + answer) > limit:
        raise ValueError(
            f"the longest prompt has {prompt} tokens, with {name} = {answer} that is {needed}, and {why} leave out long rows, "
            "or lower the number"
        )
    # Results of tools: as much as the answers.
    with_results = prompt + 2 * min(config.max_turns * config.max_new_tokens, most)
    return config.max_context or min(with_results if tools else needed, context)


def sizes_of_replica(
    config: PolicyConfig, ranks: int, max_context: int | None, sizes: Mapping[str, Any]
) -> dict[str, int]:
    """Return ``max_context`` and ``cache_tokens`` of a replica: its cache has room for the answers of a rank that a run generates at once.

    More answers, as in an evaluation, share it: some are paused if it is full. By default the replica has room for as many answers of full
    length as it may generate at once, which on a CPU can take more memory than training.

    Args:
        config: settings of the run.
        ranks: number of ranks that generate.
        max_context: maximum number of tokens of a prompt with its answers; ``None`` if only the episodes know it. Then both are bounded.
        sizes: ``max_requests`` and ``page_size`` of the replica.
    """
    at_once = -(-config.groups // ranks) * config.group_size * (1 + config.max_staleness)
    page = sizes["page_size"]
    context = max_context or min(model_context(config), _UNKNOWN)
    one = -(-context // page) * page
    tokens = one * min(at_once, sizes["max_requests"])
    if max_context is None:
        tokens = min(tokens, max(one, _UNKNOWN))
    return {"max_context": context, "cache_tokens": tokens}
