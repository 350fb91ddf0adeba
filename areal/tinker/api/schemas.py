"""JSON bodies of requests, with the field names of the protocol.

Of a known field, a wrong type is answered 422. A field that this server does not know is accepted while it is off (null, false, 0 or empty),
because newer clients send their defaults, and refused by name otherwise (:meth:`Body.refusal`).
"""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints


def _without_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError("must not contain the character NUL")
    return text


Text = Annotated[str, StringConstraints(max_length=4096), AfterValidator(_without_nul)]
Integer = Annotated[int, Field(ge=-(2**63), lt=2**63)]
SequenceNumber = Annotated[int, Field(ge=0, lt=2**63)]
Metadata = dict[Text, Any]


def text_values(metadata: dict[str, Any] | None) -> dict[str, str] | None:
    """Return the metadata of a user with values of other types as JSON."""
    if metadata is None:
        return None
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in metadata.items()}


class Body(BaseModel):
    """JSON body of a request. Fields of ``unsupported`` are known and not supported: they are refused unless they are off."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    type: Text | None = None

    def refusal(self) -> str | None:
        """Return why the request cannot be honoured, or ``None``."""
        on = sorted(name for name, value in (self.model_extra or {}).items() if value)
        return f"{', '.join(on)}: not supported by this server; leave the field out" if on else None


# ---- sessions


class ClientConfigBody(Body):
    """``client/config`` and ``client/dynamic_config``."""

    sdk_version: Text = ""


class CreateSessionBody(Body):
    """``create_session``."""

    tags: list[Text] = []
    user_metadata: Metadata | None = None
    sdk_version: Text = ""
    project_id: Text | None = None
    display_name: Text | None = None


class SessionBody(Body):
    """``session_heartbeat``."""

    session_id: Text


class FinishReason(BaseModel):
    """How a client ended a session."""

    type: Literal["success", "errored", "interrupted"]


class FinishBody(Body):
    """``sessions/{id}/finish``."""

    reason: FinishReason
    detail: Text | None = None


class TelemetryBody(Body):
    """``telemetry``. The events are not kept."""


# ---- models


class CreateModelBody(Body):
    """``create_model``. The engine validates the configurations."""

    session_id: Text
    model_seq_id: SequenceNumber
    base_model: Text
    lora_config: dict[str, Any] | None = None
    optimizer_config: dict[str, Any] | None = None
    user_metadata: Metadata | None = None


class ModelBody(Body):
    """``get_info``."""

    model_id: Text


class SequencedBody(ModelBody):
    """A request that takes its turn among the requests of its model. It fails in its turn, or later requests would wait for it forever."""

    seq_id: SequenceNumber | None = None

    def fields(self) -> dict[str, Any]:
        """Return the fields of the request that the body adds to model and number."""
        return {}


class OptimStepBody(SequencedBody):
    """``optim_step``. The SDK sends NaN as null. ``optimizer_params`` belong to optimizers other than Adam, named by their type."""

    adam_params: dict[Text, float | None] | None = None
    optimizer_params: dict[Text, Any] | None = None

    def fields(self) -> dict[str, Any]:
        given = self.adam_params if self.optimizer_params is None else self.optimizer_params
        params = dict(given or {})
        optimizer = "adamw" if self.optimizer_params is None else str(params.pop("type", ""))
        numbers = {name: math.nan if value is None else value for name, value in params.items()}
        return {"params": numbers, "optimizer": optimizer}


class SaveWeightsBody(SequencedBody):
    """``save_weights``."""

    path: Text | None = None
    ttl_seconds: Integer | None = None
    overwrite: bool = False
    user_metadata: Metadata | None = None

    def fields(self) -> dict[str, Any]:
        metadata = text_values(self.user_metadata)
        return {
            "path": self.path,
            "ttl_seconds": self.ttl_seconds,
            "overwrite": self.overwrite,
            "user_metadata": metadata,
        }


class SaveForSamplerBody(SaveWeightsBody):
    """``save_weights_for_sampler``."""

    sampling_session_seq_id: SequenceNumber | None = None
    kind: Text = "snapshot"

    def fields(self) -> dict[str, Any]:
        return {**super().fields(), "sampling_session_seq_id": self.sampling_session_seq_id}

    def refusal(self) -> str | None:
        if self.kind != "snapshot":
            return f"kind={self.kind!r} is not supported; use 'snapshot', and create a sampling client after each save"
        return super().refusal()


class SaveExternalBody(SaveWeightsBody):
    """``save_weights_external``: an adapter for download, encrypted if there are recipients."""

    path: Text
    age_encryption_recipients: list[Text] | None = None

    def fields(self) -> dict[str, Any]:
        return {**super().fields(), "age_encryption_recipients": tuple(self.age_encryption_recipients or ())}


class LoadWeightsBody(SequencedBody):
    """``load_weights``: into ``model_id``, or into a new model of ``session_id``."""

    model_id: Text = ""
    session_id: Text | None = None
    model_seq_id: SequenceNumber | None = None
    base_model: Text | None = None
    path: Text
    optimizer: bool = False
    optimizer_config: dict[str, Any] | None = None
    user_metadata: Metadata | None = None

    def fields(self) -> dict[str, Any]:
        return {"path": self.path, "optimizer": self.optimizer}


# ---- samples


class TensorBody(BaseModel):
    """A tensor as lists of numbers."""

    data: list[Any]
    dtype: Literal["float32", "int64"]
    shape: list[Integer] | None = None
    sparse_crow_indices: list[Integer] | None = None
    sparse_col_indices: list[Integer] | None = None


class ChunkBody(BaseModel):
    """A chunk of a prompt. Chunks of images are recognised, and refused by the engine."""

    type: Text = "encoded_text"
    tokens: list[Integer] | None = None


class PromptBody(BaseModel):
    """A model input."""

    chunks: list[ChunkBody]


class SamplingSessionBody(Body):
    """``create_sampling_session``."""

    session_id: Text
    sampling_session_seq_id: SequenceNumber
    base_model: Text | None = None
    model_path: Text | None = None


class SampleBody(Body):
    """``asample``. The engine validates ``sampling_params``."""

    prompt: PromptBody
    sampling_params: dict[Text, Any] = {}
    num_samples: Integer = 1
    sampling_session_id: Text | None = None
    seq_id: SequenceNumber | None = None
    base_model: Text | None = None
    model_path: Text | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Integer = 0
    topk_sample_logprobs: Integer = 0
    prompt_logprobs_last_n: Integer | None = None
    target_prompt_logprobs: TensorBody | None = None
    record_stability_info: bool | None = None


# ---- training data (decoded outside the event loop)


class DatumBody(BaseModel):
    """A training sample."""

    model_input: PromptBody
    loss_fn_inputs: dict[Text, TensorBody]
    model_input_spans: list[dict[str, Any]] | None = None
    loss_fn_input_spans: list[dict[str, Any]] | None = None


class PassInput(BaseModel):
    """Input of a forward or of a forward and backward pass."""

    data: list[DatumBody]
    loss_fn: Text
    loss_fn_config: dict[Text, float | Text] | None = None


class PassBody(SequencedBody):
    """``forward`` and ``forward_backward``."""

    forward_input: PassInput | None = None
    forward_backward_input: PassInput | None = None


# ---- futures and checkpoints


class RetrieveBody(Body):
    """``retrieve_future``."""

    request_id: Text
    allow_metadata_only: bool = False


class CancelBody(Body):
    """``cancel_future``."""

    request_id: Text


class PathBody(Body):
    """``weights_info``."""

    tinker_path: Text


class TtlBody(Body):
    """``…/ttl``. Null removes the expiry."""

    ttl_seconds: Integer | None = None
