"""State of the test server: its weights, pauses and faults."""

from __future__ import annotations

import copy
import os
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from areal.tests.harness.servers.generation import Drawing, Drawn, load, merged, one

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Projections that vLLM keeps in one tensor."""


Adapter = tuple[str, dict[str, Tensor], dict[str, Any]]
"""Folder, tensors and configuration."""


class Dead(Exception):
    """A forward after a failed load: the engine of the server ends."""


class LoadError(ValueError):
    """Weights that a worker cannot load."""


class State:
    """State of the server.

    Attributes:
        model: base model.
        label: name of the weights.
        adapters: folder, tensors and configuration by name.
        adapter_reads: number of times that the files of an adapter were read.
        root, served: path of the start that it tells, and name of its model.
        tokenizer: tokenizer, read from a directory; ``None`` without one.
        release, lora, mask_tokens: release of SGLang, and its arguments ``--enable-lora`` and ``--sampling-mask-max-tokens``.
        quantization: name of the format to which it says that it rounds; ``None`` for none.
        drawn: number of tokens.
        order: routes of the POST requests, in order.
        modern: behaves as a current vLLM. A failed load then leaves no weights, and the next forward ends the process.
        without: routes that a modern server lacks.
        routed_experts, shifted_experts: answers have the experts of each token; they are those after the router's choice.
        paused, kept, retracted: paused; the pause keeps what is running; and has put it back into the queue.
    """

    def __init__(
        self, path: str, *, modern: bool = False, routed_experts: bool = False, shifted_experts: bool = False
    ) -> None:
        self.path, self.starts_modern = path, modern
        self.routed_experts, self.shifted_experts = routed_experts, shifted_experts
        self.changed = threading.Condition()
        self.forward = threading.Lock()
        self.calls: Counter[str] = Counter()
        self.seen: list[dict[str, Any]] = []
        self.keys: set[str] = set()
        self.order: list[str] = []
        self.running = self.epoch = self.resets = 0
        self.reset()

    def reset(self) -> None:
        """End the requests of an earlier test, whose clients may be gone, and take the state of the start."""
        with self.changed:
            self.resets += 1
            self.epoch += 1
            self.paused = self.kept = False
            self.changed.notify_all()
            self.changed.wait_for(lambda: not self.running)
            self.model, self.label = load(self.path), "default"
            self.adapters: dict[str, Adapter] = {}
            self.known: dict[str, Adapter] = {}  # also those that were removed
            self._loaded: list[Adapter] = []  # all of them, so that no two have the same id
            self._inplace: set[int] = set()  # ids of those that were loaded with ``load_inplace``
            self.adapter_reads = 0
            self._merged: dict[int, PreTrainedModel] = {}
            self.retracted = False
            self.step_seconds, self.late_seconds, self.load_seconds = 0.0, 0.0, 0.0
            self.asleep, self.backup = False, False
            self.broken, self.leftover = "", ""
            self.drawn = 0
            self.modern, self.key = self.starts_modern, ""
            self.context, self.logprobs_mode = int(self.model.config.max_position_embeddings), "processed_logprobs"
            self.without: list[str] = []
            self.root = self.served = self.path
            self.tokenizer: PreTrainedTokenizerBase | None = None
            self.release, self.lora, self.mask_tokens = "0.5.23", True, 4096
            self.quantization: str | None = None
            self.aborted: set[str] = set()
            self.canned: list[dict[str, Any]] = []
            self.calls.clear()
            self.seen.clear()
            self.keys.clear()
            self.order.clear()
            self.changed.notify_all()

    def told(self) -> dict[str, Any]:
        """Return what the server was asked."""
        with self.changed:
            return {
                "calls": dict(self.calls),
                "seen": list(self.seen),
                "keys": sorted(self.keys),
                "order": list(self.order),
                "drawn": self.drawn,
                "adapter_reads": self.adapter_reads,
                "label": self.label,
            }

    def misbehave(self, body: dict[str, Any]) -> None:
        """Set attributes, and keep what is left as a reply to give."""
        if body.pop("reset", False):
            self.reset()
        for name in ("step_seconds", "late_seconds", "load_seconds", "label", "backup", "modern", "key", "context"):
            setattr(self, name, body.pop(name, getattr(self, name)))
        for name in ("logprobs_mode", "without", "root", "release", "lora", "mask_tokens", "quantization"):
            setattr(self, name, body.pop(name, getattr(self, name)))
        if "tokenizer" in body:
            self.tokenizer = AutoTokenizer.from_pretrained(body.pop("tokenizer"))
        with self.changed:
            self.canned += [body] if body else []

    def canned_for(self, route: str) -> dict[str, Any] | None:
        with self.changed:
            for entry in self.canned:
                if entry["route"] == route and entry["times"] > 0:
                    entry["times"] -= 1
                    return entry
        return None

    @property
    def own_end(self) -> int:
        """The end-of-sequence token of the model."""
        return int(self.model.generation_config.eos_token_id)

    # ---- generation

    def draw(self, asked: Drawing) -> Drawn:
        """Generate tokens.

        Blocks while the server is paused; a pause aborts it, unless the pause keeps what is running. Of vLLM, also what waits for the end of
        an earlier pause.
        """
        resets = self.resets
        time.sleep(self.late_seconds)
        with self.changed:
            epoch = self.epoch
            self.changed.wait_for(lambda: not self.paused or (self.epoch != epoch and not asked.by_position))
            if self.paused or self.resets != resets:
                return Drawn(finish="abort")
            epoch = self.epoch
            # To its end, a request keeps the adapter with which it began.
            adapter = self.adapters.get(asked.model or "")
            self.running += 1
        try:
            return self._draw(asked, adapter, epoch)
        finally:
            with self.changed:
                self.running -= 1
                self.changed.notify_all()

    def _draw(self, asked: Drawing, adapter: Adapter | None, epoch: int) -> Drawn:
        generator = torch.Generator().manual_seed(asked.seed)
        drawn = Drawn()
        while len(drawn.tokens) < asked.length:
            if self.asleep and not self.modern:
                raise ValueError("a forward without memory")
            time.sleep(self.step_seconds)
            with self.changed:
                self.changed.wait_for(lambda: not self.kept or self.epoch != epoch)
            if asked.name in self.aborted:
                drawn.finish = "abort"
                return drawn
            with self.forward:
                if self.epoch != epoch:
                    drawn.finish, drawn.queued = "abort", self.retracted
                    return drawn
                if self.kept:
                    continue
                if self.broken:
                    raise Dead(self.broken)
                text = [*asked.prompt, *drawn.tokens]
                if asked.by_position:
                    generator.manual_seed((asked.seed * 1000003 + len(text)) % 2**63)
                model = self.model if adapter is None else self._with(adapter)
                one(model, text, asked, generator, drawn, shifted_experts=self.shifted_experts)
                drawn.labels.append(self.label)
                self.drawn += 1
            # As the servers: in the text of this request.
            words = self.tokenizer.decode(drawn.tokens) if asked.stop_strings and self.tokenizer is not None else ""
            ends = (
                [drawn.tokens[-1]] if drawn.tokens[-1] in asked.stop else [x for x in asked.stop_strings if x in words]
            )
            if ends:
                drawn.finish, drawn.matched = "stop", ends[0]
                return drawn
        return drawn

    def _with(self, adapter: Adapter) -> PreTrainedModel:
        """Return the model with an adapter."""
        folder, tensors, config = adapter
        if id(adapter) in self._inplace:
            # vLLM keeps the flag of the load, and its workers read the files again at each step.
            self.adapter_reads += 1
            if not Path(folder).exists():
                raise Dead(f"No adapter found for {folder}")
        if id(adapter) not in self._merged:
            self._merged[id(adapter)] = merged(self.model, tensors, config)
        return self._merged[id(adapter)]

    # ---- pauses

    def pause(self, mode: str = "abort") -> None:
        """Pause: return what is running and what waits (``abort``), let it finish (``wait``), or freeze it (``keep``)."""
        if mode == "wait":
            with self.changed:
                self.paused = True
                self.changed.wait_for(lambda: not self.running)
            return
        with self.forward, self.changed:
            self.paused, self.kept = True, mode == "keep"
            self.epoch += mode == "abort"
            self.changed.notify_all()

    def resume(self) -> None:
        with self.changed:
            self.paused = self.kept = self.retracted = False
            self.changed.notify_all()

    def sleep(self, *, keep: bool) -> None:
        """Free the memory. Without a backup, the weights are lost."""
        with self.forward, self.changed:
            if not self.paused:
                raise ValueError("the server is not idle")
            self.asleep = True
            if not keep:
                for parameter in self.model.parameters():
                    parameter.data.zero_()

    def wake(self) -> None:
        with self.changed:
            self.asleep = False

    # ---- weights

    def load(self, path: str) -> None:
        """Load a directory that has all tensors."""
        if self.asleep:
            raise ValueError("the memory of the weights is not there")
        model = load(path)
        with self.forward:
            self.model = model
            self._merged.clear()

    def load_unchecked(self, folder: Path) -> None:
        """Load a directory as SGLang does: other names are ignored, tensors that are not there keep their values, and another shape ends it."""
        if self.asleep:
            raise ValueError("the memory of the weights is not there")
        if not folder.is_dir():
            raise ValueError(
                f"Failed to get weights iterator: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '{folder}'. Use "
                "`repo_type` argument if needed.."
            )
        tensors = {name: x for file in sorted(folder.glob("*.safetensors")) for name, x in load_file(file).items()}
        model = copy.deepcopy(self.model)
        for name, parameter in model.named_parameters():
            if name in tensors and tensors[name].shape != parameter.shape:
                self.end()
            parameter.data = tensors.get(name, parameter.data).float()
        with self.forward:
            self.model = model
            self._merged.clear()

    def end(self) -> None:
        """End the process, without a reply."""
        os._exit(1)

    def reload(self, folder: Path) -> None:
        """Load a directory as workers of vLLM do.

        Raises:
            LoadError: it does not fit. No forward is possible until a load succeeds. After a wrong shape, the next load fails too.
        """
        time.sleep(self.load_seconds)
        with self.forward:
            try:
                if self.leftover:
                    self.broken, self.leftover = self.leftover, ""
                    raise LoadError(self.broken)
                self.model = self._read(folder)
            except LoadError as error:
                self.broken = str(error)
                raise
            self.broken = ""
            self._merged.clear()

    def _read(self, folder: Path) -> PreTrainedModel:
        """Return the model with the tensors of a directory. Those that it lacks keep their values, if they are not fused with others."""
        if not (folder / "config.json").exists():
            raise LoadError(
                "Repo id must be in the form 'repo_name' or 'namespace/repo_name': '<path>'. Use `repo_type` argument if needed."
            )
        tensors = {name: x for file in sorted(folder.glob("*.safetensors")) for name, x in load_file(file).items()}
        # In memory, transformers stacks the experts that files have one by one.
        if any(".experts." in name for name in tensors):
            return load(str(folder))
        model = copy.deepcopy(self.model)
        own = dict(model.named_parameters())
        for name, tensor in tensors.items():
            if name not in own:
                inner = name.removeprefix("model.").removesuffix(".weight")
                kind = type(model.base_model).__name__
                raise LoadError(
                    f"There is no module or parameter named '{inner}' in {kind}. The available parameters are"
                )
            if tensor.shape != own[name].shape:
                self.leftover = f"Attempted to load weight ({_size(tensor)}) into parameter ({_size(own[name])})"
                raise LoadError(self.leftover)
            own[name].data = tensor.float()
        for name in own.keys() - tensors.keys():
            if any(
                name.replace(each, other) in tensors
                for group in FUSED
                for each in group
                for other in group
                if each in name
            ):
                own[name].data = torch.zeros_like(own[name])
        return model

    def add_adapter(
        self, name: str, folder: str, tensors: dict[str, Tensor], config: dict[str, Any], *, inplace: bool = False
    ) -> None:
        """Serve an adapter that was read, or replace one."""
        with self.forward:
            self.adapters[name] = self.known[name] = (folder, tensors, config)
            self._loaded.append(self.adapters[name])
            self.adapter_reads += 1
            if inplace:
                self._inplace.add(id(self.adapters[name]))

    def remove_adapter(self, name: str) -> bool:
        """Remove an adapter. Returns False if there is none of this name."""
        with self.forward:
            return self.adapters.pop(name, None) is not None


def _size(tensor: Tensor) -> str:
    return f"torch.Size({list(tensor.shape)})"
