"""Prompts that requests share: only requests of one adapter, with the same images, use the same keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.requests import RequestState

from areal.inference.local.request_name import adapter_of, images_of

_MOST = 2**31
"""Tokens are hashed as int32."""


def keyed_tokens(tokens: list[int], number: int, vocab: int) -> list[int]:
    """Return tokens to hash in place of those of a request, so that equal ones mean an equal prefix and an equal adapter.

    The digits of the number are added to the first tokens, above the range of token ids. The hash of a block contains that of the block
    before it, so that later blocks differ, too. The tokens of a request without adapter (number 0) are unchanged.

    Args:
        tokens: ids below ``vocab``.
        number: number of the adapter.
        vocab: number of token ids.
    """
    if not number:
        return tokens
    keyed, base = list(tokens), _MOST // vocab
    for position in range(len(keyed)):
        number, digit = divmod(number, base)
        keyed[position] += digit * vocab
        if not number:
            break
    return keyed


def share_by_content(cache: PagedAttentionCache, vocab: int) -> None:
    """Let a cache find and register blocks by their tokens and images, and by the adapter of their request."""
    search = cache.search_prefix_match

    def keyed(request_id: str, tokens: list[int]) -> list[int]:
        adapter, images = adapter_of(request_id), images_of(request_id)
        number = 0 if adapter is None else adapter.number
        keyed = keyed_tokens(tokens, number, vocab)
        return keyed if images is None else images.hashed(keyed, number, vocab)

    def mark(state: RequestState, complete_blocks: dict[str, int]) -> None:
        # Unlike transformers', also for a request that ends with its first token: batching is synchronous, and its blocks are not free yet.
        tokens = keyed(state.request_id, state.initial_tokens + state.generated_tokens) if complete_blocks else []
        for name, count in complete_blocks.items():
            cache.cache_allocators[name].mark_complete_blocks(state.request_id, tokens, count)

    # Replaced on this object: transformers offers no other way to change what is hashed.
    replaced: Any = cache
    replaced.search_prefix_match = lambda request_id, tokens: search(request_id, keyed(request_id, tokens))
    replaced.mark_complete_blocks = mark


PromptKey = tuple[int, tuple[int, ...]]
"""Number of the adapter, and tokens of the prompt, with the hashes of its images."""


class SharedPrompts:
    """Requests that wait until another one has computed their prompt. Callers serialize all calls."""

    def __init__(self) -> None:
        # By prompt: the request that computes it, and those that wait.
        self._waiting: dict[PromptKey, tuple[str, list[str]]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def waits(self, key: PromptKey, name: str) -> bool:
        """Return True if a request must wait for another one. Otherwise later requests wait for this one."""
        if key in self._waiting:
            self._waiting[key][1].append(name)
            return True
        self._waiting[key] = (name, [])
        return False

    def computed(self, key: PromptKey, name: str) -> Sequence[str]:
        """Return the requests that need not wait any longer, now that ``name`` has computed its prompt or has ended."""
        if key in self._waiting and self._waiting[key][0] == name:
            return self._waiting.pop(key)[1]
        return ()
