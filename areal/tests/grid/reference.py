"""Reference for every engine: plain transformers in float64, one process, one unpacked sequence at a time.

It uses no code of the engines, only the types that a loss function receives.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from areal.api import IGNORE_INDEX, Batch, LossFn, LossWeightFn, Metric, OptimizerConfig, StepSettings, TokenOutputs
from areal.tests.grid.float64_mode import float64_everywhere
from areal.tests.grid.models import VALUE_HEAD
from areal.tests.grid.muon_reference import ReferenceMuon
from areal.tests.grid.vision_models import IMAGE_TOKEN, VISION_FAMILIES

Sample = Mapping[str, Any]
"""One sequence: ``input_ids`` ``[S]``, other per-token keys ``[S, ...]``, per-sequence keys without a sequence dimension."""

Outputs = tuple[str, ...]

_EXPERTS = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)$")


@dataclass(frozen=True)
class ReferenceStep:
    """Results of a step on the global batch. ``gradients`` are float64, under the names in the model's files."""

    loss: float
    terms: dict[str, float]
    weights: dict[str, float]
    metrics: dict[str, float]
    gradients: dict[str, Tensor] = field(default_factory=dict)
    grad_norm: float = 0.0


class Reference:
    """A float64 model that computes a step on a list of sequences.

    Args:
        path: str. Model directory.
        temperature: float. Divides the logits of a sequence without a ``temperature``.
        value_head: ``[1, H]``. If given, ``values`` are computed.
        adapter: str. Directory of an adapter in peft's format, which is trained instead of the model.
    """

    def __init__(
        self, path: str, *, temperature: float = 1.0, value_head: Tensor | None = None, adapter: str | None = None
    ) -> None:
        with float64_everywhere():
            images = AutoConfig.from_pretrained(path).model_type in VISION_FAMILIES
            factory = AutoModelForImageTextToText if images else AutoModelForCausalLM
            self.model = factory.from_pretrained(
                path, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
            ).eval()
            # Some families make parameters in float32 whatever the dtype is.
            for parameter in self.model.parameters():
                parameter.data = parameter.data.to(torch.float64)
            if adapter is not None:
                self.model = PeftModel.from_pretrained(self.model, adapter, is_trainable=True).double().eval()
        self._temperature = temperature
        self._value_head = None if value_head is None else torch.nn.Parameter(value_head.detach().double().clone())
        self._optimizer: torch.optim.Optimizer | ReferenceMuon | None = None
        self._pending = ReferenceStep(0.0, {}, {}, {})

    # ---- outputs

    def outputs(self, sample: Sample) -> TokenOutputs:
        """Compute all per-token outputs of one sequence, differentiable."""
        states: list[Tensor] = []
        hook = self.model.get_decoder().register_forward_hook(
            lambda module, args, out: states.append(out.last_hidden_state[0])
        )
        with float64_everywhere():
            logits = self.model(sample["input_ids"][None], use_cache=False, **_images(sample)).logits[0]
        hook.remove()
        logits = logits / float(sample.get("temperature", self._temperature))
        log_probs = logits.log_softmax(-1)
        targets = _targets(sample)
        picked = log_probs.gather(-1, targets.clamp(min=0).reshape(len(logits), -1)).reshape(targets.shape)
        return TokenOutputs(
            logprobs=picked.masked_fill(targets == IGNORE_INDEX, 0.0),
            entropy=-(log_probs.exp() * log_probs).sum(-1),
            values=None if self._value_head is None else states[0] @ self._value_head[0],
            logits=logits,
            hidden=states[0],
        )

    @torch.no_grad()
    def forward(self, samples: Sequence[Sample], names: Outputs) -> dict[str, list[Tensor]]:
        """Compute outputs by name, one tensor for each sample."""
        per_sample = [self.outputs(sample) for sample in samples]
        return {name: [getattr(outputs, name) for outputs in per_sample] for name in names}

    # ---- a step

    def step(
        self,
        samples: Sequence[Sample],
        loss_fn: LossFn,
        weight_fn: LossWeightFn,
        *,
        divide_by: float | None = None,
        loss_weight: float = 1.0,
        gradients: bool = True,
    ) -> ReferenceStep:
        """Compute loss, terms, metrics and gradients of the global batch; gradients are added to the pending ones.

        Args:
            divide_by: float. Divisor of the sums; ``None`` for the global weight of each term.
            loss_weight: float. Scale of all terms.
            gradients: bool. False does not change the pending gradients.
        """
        batches = [one_sequence(sample) for sample in samples]
        weights = [_terms(weight_fn(batch)) for batch in batches]
        total = {name: math.fsum(float(weight[name]) for weight in weights) for name in weights[0]}
        scale = {name: loss_weight / (total[name] if divide_by is None else divide_by) for name in total}
        sums = dict.fromkeys(total, 0.0)
        metrics: dict[str, list[Metric]] = {}
        with torch.set_grad_enabled(gradients):
            for sample, batch, weight in zip(samples, batches, weights, strict=True):
                returned = loss_fn(self.outputs(sample), batch)
                loss, reported = returned if isinstance(returned, tuple) else (returned, {})
                counted = {name: term for name, term in _terms(loss).items() if float(weight[name])}
                if counted and gradients:
                    with float64_everywhere():
                        torch.stack([scale[name] * term for name, term in counted.items()]).sum().backward()
                for name, term in counted.items():
                    sums[name] += term.item()
                for name, metric in reported.items():
                    metrics.setdefault(name, []).append(metric)
        terms = {name: scale[name] * value for name, value in sums.items()}
        named = dict(self.named_gradients()) if gradients else {}
        return ReferenceStep(
            loss=math.fsum(terms.values()),
            terms=terms,
            weights=total,
            metrics={name: _reduce(values) for name, values in metrics.items()},
            gradients=named,
            grad_norm=math.sqrt(math.fsum(gradient.square().sum().item() for gradient in named.values())),
        )

    # ---- weights and gradients, under their names in files

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the trained weights by name, in the form of transformers' modules."""
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                # peft does not write the name of the adapter
                yield name.replace(".default.weight", ".weight"), parameter
        if self._value_head is not None:
            yield VALUE_HEAD, self._value_head

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield copies of the weights, one per expert, and of the buffers that are stored in files."""
        stored = self.model.state_dict()
        buffers = ((name, buffer) for name, buffer in self.model.named_buffers() if name in stored)
        return _as_in_files((name, tensor.detach().clone()) for name, tensor in chain(self.named_parameters(), buffers))

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield copies of the pending gradients in the same form; zeros for missing ones."""
        gradients = (
            (name, torch.zeros_like(p) if p.grad is None else p.grad.clone()) for name, p in self.named_parameters()
        )
        return _as_in_files(gradients)

    # ---- optimizer

    def make_optimizer(self, config: OptimizerConfig, total_steps: int) -> None:
        """Create torch's AdamW or SGD over all weights, or Muon."""
        weights = [parameter for _, parameter in self.named_parameters()]
        if config.type == "sgd":
            self._optimizer = torch.optim.SGD(
                weights, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay
            )
        elif config.type == "muon":
            self._optimizer = ReferenceMuon(list(self.named_parameters()), config, self._qkv())
        else:
            betas = (config.beta1, config.beta2)
            self._optimizer = torch.optim.AdamW(
                weights, lr=config.lr, betas=betas, eps=config.eps, weight_decay=config.weight_decay, foreach=False
            )
        self._config, self._total_steps, self._taken = config, total_steps, 0

    def _qkv(self) -> tuple[int, int]:
        """Return the rows of queries, and of keys or values."""
        text = self.model.config.get_text_config()
        head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        return text.num_attention_heads * head, text.num_key_value_heads * head

    def optimizer_step(self, settings: StepSettings | None = None) -> tuple[float, float]:
        """Clip to the global norm, step, discard gradients. Returns the norm before clipping, and the learning rate."""
        config, own = self._config, vars(settings or StepSettings())
        if self._optimizer is None:
            raise RuntimeError("call make_optimizer first")
        gradients = [parameter.grad for _, parameter in self.named_parameters() if parameter.grad is not None]
        norm = math.sqrt(math.fsum(gradient.square().sum().item() for gradient in gradients))
        limit = own["gradient_clipping"] or config.gradient_clipping
        if limit is not None and norm > limit:
            for gradient in gradients:
                gradient *= limit / (norm + 1e-6)  # as torch.nn.utils.clip_grad_norm_ does
        rate = config.lr * learning_rate(config, self._total_steps)(self._taken)
        usual = {"lr": rate, "weight_decay": config.weight_decay}
        if config.type != "sgd":
            usual |= {"betas": (config.beta1, config.beta2), "eps": config.eps}
        values = {name: value if own[name] is None else own[name] for name, value in usual.items()}
        for group in self._optimizer.param_groups:
            group.update(values)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._taken += 1
        return norm, values["lr"]


def learning_rate(config: OptimizerConfig, total: int) -> Callable[[int], float]:
    """Return the learning-rate factor at step ``i``, as OptimizerConfig's docstring defines it."""
    warmup, floor = config.warmup_steps, config.min_lr_ratio

    def fall(start: float, end: float, shape: Callable[[float], float]) -> Callable[[int], float]:
        return lambda i: floor + (1 - floor) * shape(min(1.0, max(0.0, (i - start) / max(1.0, end - start))))

    after = {
        "constant": lambda i: 1.0,
        "linear": fall(warmup, total, lambda x: 1 - x),
        "cosine": fall(warmup, total, lambda x: (1 + math.cos(math.pi * x)) / 2),
        "wsd": fall(total - max(1, round(config.decay_ratio * total)), total, lambda x: 1 - x),
    }[config.lr_scheduler]
    return lambda i: (i + 1) / warmup if i < warmup else after(i)


def one_sequence(sample: Sample) -> Batch:
    """Return the batch that a loss function receives for one sequence."""
    length, targets = len(sample["input_ids"]), _targets(sample)
    values: dict[str, Any] = {}
    for key, value in sample.items():
        if key not in ("meta", "pixel_values", "image_grid_thw"):
            per_token = value.dim() > 0 and value.shape[0] == length
            values[key] = value if per_token else value[None]
    values["target_ids"] = targets
    if "loss_mask" in values:
        missing = targets == IGNORE_INDEX if targets.dim() == 1 else (targets == IGNORE_INDEX).all(-1)
        values["loss_mask"] = values["loss_mask"].masked_fill(missing, 0)
    return Batch(values, torch.tensor([0, length], dtype=torch.int32), sample.get("meta"))


def _images(sample: Sample) -> dict[str, Tensor]:
    """Return the images of a sample, and which of its tokens stand for them, as arguments of transformers."""
    images = {key: sample[key] for key in ("pixel_values", "image_grid_thw") if len(sample.get(key, ()))}
    kinds = (sample["input_ids"] == IMAGE_TOKEN).long()[None]
    name = "mm_token_type_ids" if "image_grid_thw" in images else "token_type_ids"
    return {**images, name: kinds} if images else {}


def _targets(sample: Sample) -> Tensor:
    if "target_ids" in sample:
        return sample["target_ids"]
    ids = sample["input_ids"]
    return torch.cat([ids[1:], torch.full((1,), IGNORE_INDEX)])


def _terms(value: Any) -> dict[str, Tensor]:
    return value if isinstance(value, dict) else {"loss": value}


def _reduce(metrics: Sequence[Metric]) -> float:
    values, weights = [float(metric.value) for metric in metrics], [float(metric.weight) for metric in metrics]
    if metrics[0].reduce == "mean":
        total = math.fsum(weights)
        return math.fsum(v * w for v, w in zip(values, weights, strict=True)) / total if total else 0.0
    return {"sum": math.fsum, "min": min, "max": max}[metrics[0].reduce](values)


def _as_in_files(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Split the stacked experts of transformers into one tensor per expert and projection, as in files."""
    for name, tensor in tensors:
        match = _EXPERTS.match(name)
        if match is None:
            yield name, tensor
            continue
        for expert, weight in enumerate(tensor):
            if match[2] == "down_proj":
                yield f"{match[1]}.{expert}.down_proj.weight", weight
            else:
                gate, up = weight.chunk(2)
                yield f"{match[1]}.{expert}.gate_proj.weight", gate
                yield f"{match[1]}.{expert}.up_proj.weight", up
