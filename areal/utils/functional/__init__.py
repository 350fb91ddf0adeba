"""Functions of tensors that know no engine: from hidden states to log-probs, entropy, the most likely tokens, or all logits."""

from areal.utils.functional.head_update import HeadUpdate
from areal.utils.functional.logprobs import HeadOutputs, head_outputs, logits

__all__ = ["HeadOutputs", "HeadUpdate", "head_outputs", "logits"]
