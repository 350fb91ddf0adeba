"""Probe of a model: train a tiny random copy on the CPU, and compare it with the model's own forward.

A configuration does not show whether layers mix neighbouring tokens without attention, need a window that only a mask
contains, or see later tokens, nor how logits are computed from hidden states. A copy with one small layer of each kind shows
it, in a few seconds: log-probs and their gradient must be those of each sequence by itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from areal.api.batch import IGNORE_INDEX
from areal.engine.attention.context_parallel import AttentionLayout, ContextParallel
from areal.engine.attention.token_stream import TokenStream
from areal.engine.model.heads import decoder_of
from areal.engine.model.packed_lm import ModelInputs, PackedCausalLM
from areal.engine.model.tiny_config import VOCABULARY, tiny_configs
from areal.engine.recurrence.rows import keep_weights

LENGTHS = (9, 1, 14, 2)
"""Lengths of the sequences that the probe runs. The long ones exceed the reduced sliding window."""

_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3}
"""Relative tolerance. Rounding stays below (modeling code casts to float32 in places), a leaked token far above."""

_SLOW_DECAY = -3.0
"""Logarithm of the decay of recurrent states: with the fast decay of random weights, a state that leaks into the next sequence hardly shows."""


@dataclass(frozen=True)
class ProbeResult:
    """Result of a probe. Each text is ``None`` if the check passed or was not made, else a description of the difference.

    Attributes:
        runs: a tiny copy runs on the CPU. The other checks need it.
        head: log-probs of single sequences are those of the model's own forward, with one of the heads.
        own_head: they are with the model's own head only.
        packed: sequences packed end to end have the log-probs and gradients of each sequence by itself.
        rows: so have right-padded sequences, one per row.
        causal: a token does not change the hidden states of earlier tokens.
        training: without dropout, outputs in training mode are those in evaluation mode.
    """

    runs: str | None = None
    head: str | None = None
    own_head: bool = False
    packed: str | None = None
    rows: str | None = None
    causal: str | None = None
    training: str | None = None


def probe(config: PretrainedConfig, implementation: str | None) -> ProbeResult:
    """Run a tiny random copy of the model on the CPU. Deterministic, and without effect on the caller's random state.

    Args:
        config: configuration of a causal language model.
        implementation: name of a registered attention implementation that takes ``packed=AttentionLayout``. ``None``: packing
            is not checked.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.enable_grad():
        try:
            tiny, narrow = _copies(config)
        except Exception as error:  # an unknown model may raise anything
            return ProbeResult(runs=f"a tiny copy of it does not run: {_first_line(error)}")
        # The head first: everything else is compared with the head that is right for single sequences.
        head, own_head = tiny.compare(tiny.alone(own_head=False)), False
        if head is not None:
            head, own_head = tiny.compare(tiny.alone(own_head=True)), True
        if head is not None:
            return ProbeResult(head=head, causal=tiny.causal())
        return ProbeResult(
            own_head=own_head,
            packed=tiny.compare(tiny.packed(implementation, own_head)) if implementation else None,
            rows=narrow.compare(narrow.padded(own_head)),
            causal=tiny.causal(),
            training=narrow.compare(narrow.padded(own_head, training=True)),
        )


def _copies(config: PretrainedConfig) -> tuple[_TinyCopy, _TinyCopy]:
    """Return tiny copies for single or packed sequences, and for padded ones.

    The first is in float64 if that runs: an amplified rounding error is smaller there than the effect of any leak. The second is in
    float32: eager attention in float64 returns NaN at padding that sees no token.

    Raises:
        Exception: no copy runs; the error is that of the last attempt.
    """
    failure: Exception = ValueError("it has no tiny copy")
    for tiny in tiny_configs(config):
        copies = []
        for dtype in _TOLERANCE:
            try:
                copies.append(_TinyCopy(tiny, dtype))
            except Exception as error:
                failure = error
        if copies:
            return copies[0], copies[-1]
    raise failure


class _TinyCopy:
    """A tiny model, and the log-probs and gradients that its unchanged forward gives for single sequences.

    Args:
        config: tiny configuration.
        dtype: dtype of the model.
    """

    def __init__(self, config: PretrainedConfig, dtype: torch.dtype) -> None:
        # torch.manual_seed would also seed the generators of GPUs, which are not restored.
        torch.default_generator.manual_seed(0)
        self._config, self._dtype = config, dtype
        self._model = self._build(config, "eager")
        # Biases start at 0 and norms at 1, which would hide a missing one.
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                if name.endswith("A_log"):
                    parameter.fill_(_SLOW_DECAY)
                elif parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
        self._sequences = [torch.randint(3, VOCABULARY, (n,)) for n in LENGTHS]
        self._factors = [torch.rand(n, dtype=dtype) + 0.5 for n in LENGTHS]
        logits = [self._model(input_ids=ids[None], use_cache=False).logits[0] for ids in self._sequences]
        picked = [
            torch.cat([z.log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0], z.new_zeros(1)])
            for z, ids in zip(logits, self._sequences, strict=True)
        ]
        self._expected = self._with_gradient(torch.cat(picked), self._model)

    def alone(self, *, own_head: bool) -> Callable[[], list[Tensor]]:
        """Return a function that runs each sequence by itself."""

        def run() -> list[Tensor]:
            model = PackedCausalLM(self._model, own_head=own_head)
            inputs = [self._inputs([i], layout=None) for i in range(len(LENGTHS))]
            return self._with_gradient(torch.cat([model(each)["logprobs"] for each in inputs]), self._model)

        return run

    def padded(self, own_head: bool, *, training: bool = False) -> Callable[[], list[Tensor]]:
        """Return a function that runs right-padded sequences, one per row, with the attention that an engine would use."""

        def run() -> list[Tensor]:
            hf = self._copy(None).train(training)
            out = PackedCausalLM(hf, own_head=own_head)(self._inputs(range(len(LENGTHS)), None))
            return self._with_gradient(out["logprobs"], hf)

        return run

    def packed(self, implementation: str, own_head: bool) -> Callable[[], list[Tensor]]:
        """Return a function that runs all sequences end to end, with the same weights."""

        def run() -> list[Tensor]:
            hf = self._copy(implementation)
            model = PackedCausalLM(hf, own_head=own_head)
            layout = ContextParallel(None, recurrence=model.recurrence).layout(TokenStream.of(LENGTHS, sum(LENGTHS)))
            out = model(self._inputs(range(len(LENGTHS)), layout))
            return self._with_gradient(out["logprobs"], hf)

        return run

    @torch.no_grad()
    def causal(self) -> str | None:
        """Replace the last token of each sequence, and describe how the hidden states of the others change."""
        decoder, worst = decoder_of(self._model), 0.0
        for ids in self._sequences:
            changed = torch.cat([ids[:-1], (ids[-1:] + 1) % VOCABULARY])
            before, after = (decoder(input_ids=x[None], use_cache=False).last_hidden_state[0] for x in (ids, changed))
            worst = max(worst, _relative(after[:-1], before[:-1]))
        return self._describe(worst)

    def compare(self, run: Callable[[], list[Tensor]]) -> str | None:
        """Return ``None`` if ``run`` computes the expected log-probs and gradient, else its error or the difference."""
        try:
            found = run()
        except Exception as caught:
            return _first_line(caught)
        return self._describe(max(_relative(x, y) for x, y in zip(found, self._expected, strict=True)))

    def _describe(self, error: float) -> str | None:
        within = error <= _TOLERANCE[self._dtype]
        return None if within else f"outputs of a tiny copy differ by {error:.1g} of their size"

    def _copy(self, implementation: str | None) -> PreTrainedModel:
        """Return a model with the same weights; ``None`` for transformers' choice of attention."""
        hf = self._build(self._config, implementation)
        hf.load_state_dict(self._model.state_dict())
        return hf

    def _build(self, config: PretrainedConfig, implementation: str | None) -> PreTrainedModel:
        # A copy of the configuration, because building a model writes the attention implementation into it.
        # The grouped matrix product of experts does not support float64.
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), attn_implementation=implementation, experts_implementation="eager", dtype=self._dtype
        ).eval()
        # Before the first forward, because copies get the weights that it leaves.
        keep_weights(model)
        return model

    def _with_gradient(self, logprobs: Tensor, model: PreTrainedModel) -> list[Tensor]:
        """Return log-probs, and the gradient of their weighted sum in all parameters."""
        loss = (logprobs * torch.cat(self._factors)).sum()
        parameters = [p for p in model.parameters() if p.requires_grad]
        grads = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        return [logprobs.detach(), torch.cat([grad.flatten() for grad in grads])]

    def _inputs(self, which: Iterable[int], layout: AttentionLayout | None) -> ModelInputs:
        """Return some sequences as an engine passes them: packed with a layout, one per row without."""
        sequences = [self._sequences[i] for i in which]
        lengths, width = [len(ids) for ids in sequences], max(map(len, sequences))
        grid = torch.cat([torch.arange(n) + row * width for row, n in enumerate(lengths)])
        return ModelInputs(
            input_ids=torch.cat(sequences),
            position_ids=torch.cat([torch.arange(n) for n in lengths]),
            targets=torch.cat([torch.cat([ids[1:], ids.new_tensor([IGNORE_INDEX])]) for ids in sequences]),
            temperature=1.0,
            layout=layout,
            rows=None if layout else (grid, len(lengths), width),
            outputs=("logprobs",),
        )


def _relative(found: Tensor, expected: Tensor) -> float:
    if not expected.numel():
        return 0.0
    error = ((found - expected).norm() / expected.norm()).item()
    return error if error == error else torch.inf  # NaN would pass every comparison


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
