"""The decoder of a Hugging Face model: the module between token ids and the hidden states that the output head takes."""

from __future__ import annotations

from transformers import PreTrainedModel


def decoder_of(hf: PreTrainedModel) -> PreTrainedModel:
    """Return the decoder of a causal language model.

    Raises:
        ValueError: no module of the model is its decoder.
    """
    # Some families answer get_decoder() with their output layer, or with themselves.
    for module in (hf.get_decoder(), hf.base_model, *hf.children()):
        if isinstance(module, PreTrainedModel) and module is not hf:
            return module
    raise ValueError(f"{type(hf).__name__} has no module that is its decoder, so that it cannot be trained")
