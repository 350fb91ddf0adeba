"""Application of adapters in a forward, each to the tokens of its requests."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.generation.continuous_batching.requests import FutureRequestState

from areal.engine.lora.adapter_plan import head_name
from areal.inference.local.request_name import adapter_of
from areal.inference.local.served_adapters import ServedAdapter

Runs = list[tuple[ServedAdapter, slice | Tensor]]
"""Adapters of a forward, each with the rows of its tokens."""


class AdapterRouter:
    """Adds adapters to the outputs of linear layers.

    A forward contains the tokens of many requests one after the other. Layers have hooks from a forward with adapters to the next one
    without, so that others cost nothing. All calls are made between two forwards.

    Args:
        model: model whose forwards are adapted.

    Attributes:
        stream: stream on which forwards are computed; ``None`` on a CPU.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._head = head_name(model)
        # Otherwise the head computes the logits of all tokens, and the manager selects rows afterwards.
        self._head_has_last_tokens = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._layers: dict[str, nn.Module] = {}
        self._hooks: list[RemovableHandle] = []
        self._runs: Runs = []
        self._head_runs: Runs = []
        self.stream: torch.Stream | None = None

    def schedule(self, requests: Sequence[FutureRequestState]) -> None:
        """Set the adapters of the next forward, from its requests in the order of their tokens."""
        adapters = [adapter_of(request.state.request_id) for request in requests]
        if not any(adapters):
            self.clear()
            return
        self._runs = self._rows_of(adapters, [request.query_length for request in requests])
        # The head computes one row for each request at the end of its prompt, or beyond.
        last = [int(request.has_new_token) for request in requests]
        self._head_runs = self._rows_of(adapters, last) if self._head_has_last_tokens else self._runs
        for adapter, _ in self._runs:
            adapter.use_on(self.stream)
        self._install({name for adapter, _ in self._runs for name in adapter.factors})

    @contextmanager
    def sequences(self, adapters: Sequence[ServedAdapter | None], length: int, head_length: int) -> Iterator[None]:
        """Context of a forward whose input is ``[n, length]``, with an adapter or none for each row. Generation must be paused.

        Args:
            head_length: positions of each row that the head reads.
        """
        self.clear()
        self._runs = self._rows_of(adapters, [length] * len(adapters))
        self._head_runs = self._rows_of(adapters, [head_length] * len(adapters))
        self._install({name for adapter, _ in self._runs for name in adapter.factors})
        try:
            yield
        finally:
            self.clear()

    def clear(self) -> None:
        """Apply no adapter, and remove all hooks."""
        self._runs, self._head_runs = [], []
        self._install(set())

    def _rows_of(self, adapters: Sequence[ServedAdapter | None], lengths: Sequence[int]) -> Runs:
        """Return the rows of each adapter, given the adapter and the number of rows of each request."""
        spans: dict[ServedAdapter, list[tuple[int, int]]] = {}
        start = 0
        for adapter, length in zip(adapters, lengths, strict=True):
            if adapter is not None and length:
                mine = spans.setdefault(adapter, [])
                # Rows of neighbours are one span.
                begin = mine.pop()[0] if mine and mine[-1][1] == start else start
                mine.append((begin, start + length))
            start += length
        return [(adapter, self._rows(mine)) for adapter, mine in spans.items()]

    def _rows(self, spans: list[tuple[int, int]]) -> slice | Tensor:
        if len(spans) == 1:
            return slice(*spans[0])
        rows = [row for start, stop in spans for row in range(start, stop)]
        return torch.tensor(rows, dtype=torch.int64, device=self._model.device)

    def _install(self, names: set[str]) -> None:
        """Hook exactly these layers."""
        if names == self._layers.keys():
            return
        for hook in self._hooks:
            hook.remove()
        self._layers = {name: self._model.get_submodule(name) for name in names}
        self._hooks = [layer.register_forward_hook(self._hook(name)) for name, layer in self._layers.items()]
        if names:
            self._hooks.append(self._model.register_forward_hook(self._end))

    def _end(self, *_: Any) -> None:
        """Apply nothing in later forwards: the next one may be the caller's own. Its hooks stay, as the next batch probably needs them."""
        self._runs, self._head_runs = [], []

    def _hook(self, name: str) -> Callable[..., None]:
        head = name == self._head

        def add(layer: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
            x, rows_of_out = args[0].flatten(0, -2), out.view(-1, out.shape[-1])
            for adapter, rows in self._head_runs if head else self._runs:
                factors = adapter.factors.get(name)
                if factors is not None:
                    factors.add_to(rows_of_out, x, rows)

        return add
