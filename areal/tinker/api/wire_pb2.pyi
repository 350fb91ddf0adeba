from collections.abc import Iterable as _Iterable
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar

from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper

DESCRIPTOR: _descriptor.FileDescriptor

class DType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_UNSPECIFIED: _ClassVar[DType]
    DTYPE_FLOAT32: _ClassVar[DType]
    DTYPE_INT64: _ClassVar[DType]
    DTYPE_INT32: _ClassVar[DType]
    DTYPE_BFLOAT16: _ClassVar[DType]

class StopReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STOP_REASON_STOP: _ClassVar[StopReason]
    STOP_REASON_LENGTH: _ClassVar[StopReason]

DTYPE_UNSPECIFIED: DType
DTYPE_FLOAT32: DType
DTYPE_INT64: DType
DTYPE_INT32: DType
DTYPE_BFLOAT16: DType
STOP_REASON_STOP: StopReason
STOP_REASON_LENGTH: StopReason

class SparseCsr(_message.Message):
    __slots__ = ("col_indices", "crow_indices", "values")
    VALUES_FIELD_NUMBER: _ClassVar[int]
    CROW_INDICES_FIELD_NUMBER: _ClassVar[int]
    COL_INDICES_FIELD_NUMBER: _ClassVar[int]
    values: bytes
    crow_indices: bytes
    col_indices: bytes
    def __init__(
        self, values: bytes | None = ..., crow_indices: bytes | None = ..., col_indices: bytes | None = ...
    ) -> None: ...

class Tensor(_message.Message):
    __slots__ = ("dense", "dtype", "shape", "sparse_csr")
    DENSE_FIELD_NUMBER: _ClassVar[int]
    SPARSE_CSR_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    dense: bytes
    sparse_csr: SparseCsr
    dtype: DType
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(
        self,
        dense: bytes | None = ...,
        sparse_csr: SparseCsr | _Mapping | None = ...,
        dtype: DType | str | None = ...,
        shape: _Iterable[int] | None = ...,
    ) -> None: ...

class BatchedTensor(_message.Message):
    __slots__ = ("data", "dtype", "offsets", "trailing_shape")
    DATA_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    TRAILING_SHAPE_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    offsets: bytes
    dtype: DType
    trailing_shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(
        self,
        data: bytes | None = ...,
        offsets: bytes | None = ...,
        dtype: DType | str | None = ...,
        trailing_shape: _Iterable[int] | None = ...,
    ) -> None: ...

class EncodedText(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: bytes
    def __init__(self, tokens: bytes | None = ...) -> None: ...

class Image(_message.Message):
    __slots__ = ("data", "format")
    DATA_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    format: str
    def __init__(self, data: bytes | None = ..., format: str | None = ...) -> None: ...

class Dmel(_message.Message):
    __slots__ = ("dmel",)
    DMEL_FIELD_NUMBER: _ClassVar[int]
    dmel: bytes
    def __init__(self, dmel: bytes | None = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("dmel", "encoded_text", "image")
    ENCODED_TEXT_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    DMEL_FIELD_NUMBER: _ClassVar[int]
    encoded_text: EncodedText
    image: Image
    dmel: Dmel
    def __init__(
        self,
        encoded_text: EncodedText | _Mapping | None = ...,
        image: Image | _Mapping | None = ...,
        dmel: Dmel | _Mapping | None = ...,
    ) -> None: ...

class TokenRun(_message.Message):
    __slots__ = ("length", "offset", "sequence_id")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    sequence_id: str
    offset: int
    length: int
    def __init__(self, sequence_id: str | None = ..., offset: int | None = ..., length: int | None = ...) -> None: ...

class Span(_message.Message):
    __slots__ = ("prompt_tokens", "sampled_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: TokenRun
    sampled_tokens: TokenRun
    def __init__(
        self, prompt_tokens: TokenRun | _Mapping | None = ..., sampled_tokens: TokenRun | _Mapping | None = ...
    ) -> None: ...

class Datum(_message.Message):
    __slots__ = ("loss_fn_input_spans", "loss_fn_inputs", "model_input", "model_input_spans")
    class LossFnInputsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Tensor
        def __init__(self, key: str | None = ..., value: Tensor | _Mapping | None = ...) -> None: ...

    MODEL_INPUT_FIELD_NUMBER: _ClassVar[int]
    LOSS_FN_INPUTS_FIELD_NUMBER: _ClassVar[int]
    MODEL_INPUT_SPANS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FN_INPUT_SPANS_FIELD_NUMBER: _ClassVar[int]
    model_input: _containers.RepeatedCompositeFieldContainer[Chunk]
    loss_fn_inputs: _containers.MessageMap[str, Tensor]
    model_input_spans: _containers.RepeatedCompositeFieldContainer[Span]
    loss_fn_input_spans: _containers.RepeatedCompositeFieldContainer[Span]
    def __init__(
        self,
        model_input: _Iterable[Chunk | _Mapping] | None = ...,
        loss_fn_inputs: _Mapping[str, Tensor] | None = ...,
        model_input_spans: _Iterable[Span | _Mapping] | None = ...,
        loss_fn_input_spans: _Iterable[Span | _Mapping] | None = ...,
    ) -> None: ...

class LossConfigValue(_message.Message):
    __slots__ = ("number", "text")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    number: float
    text: str
    def __init__(self, number: float | None = ..., text: str | None = ...) -> None: ...

class ForwardBackwardRequest(_message.Message):
    __slots__ = ("data", "forward_only", "loss_fn", "loss_fn_config", "loss_fn_config_v2", "model_id", "seq_id")
    class LossFnConfigEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: str | None = ..., value: float | None = ...) -> None: ...

    class LossFnConfigV2Entry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: LossConfigValue
        def __init__(self, key: str | None = ..., value: LossConfigValue | _Mapping | None = ...) -> None: ...

    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    LOSS_FN_FIELD_NUMBER: _ClassVar[int]
    LOSS_FN_CONFIG_FIELD_NUMBER: _ClassVar[int]
    FORWARD_ONLY_FIELD_NUMBER: _ClassVar[int]
    LOSS_FN_CONFIG_V2_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    seq_id: int
    data: _containers.RepeatedCompositeFieldContainer[Datum]
    loss_fn: str
    loss_fn_config: _containers.ScalarMap[str, float]
    forward_only: bool
    loss_fn_config_v2: _containers.MessageMap[str, LossConfigValue]
    def __init__(
        self,
        model_id: str | None = ...,
        seq_id: int | None = ...,
        data: _Iterable[Datum | _Mapping] | None = ...,
        loss_fn: str | None = ...,
        loss_fn_config: _Mapping[str, float] | None = ...,
        forward_only: bool | None = ...,
        loss_fn_config_v2: _Mapping[str, LossConfigValue] | None = ...,
    ) -> None: ...

class ArrayRecord(_message.Message):
    __slots__ = ("fields", "num_datums", "type_tag")
    class FieldsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: BatchedTensor
        def __init__(self, key: str | None = ..., value: BatchedTensor | _Mapping | None = ...) -> None: ...

    TYPE_TAG_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    NUM_DATUMS_FIELD_NUMBER: _ClassVar[int]
    type_tag: str
    fields: _containers.MessageMap[str, BatchedTensor]
    num_datums: int
    def __init__(
        self,
        type_tag: str | None = ...,
        fields: _Mapping[str, BatchedTensor] | None = ...,
        num_datums: int | None = ...,
    ) -> None: ...

class ForwardBackwardOutput(_message.Message):
    __slots__ = ("loss_fn_output_type", "loss_fn_outputs", "metrics")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: str | None = ..., value: float | None = ...) -> None: ...

    LOSS_FN_OUTPUT_TYPE_FIELD_NUMBER: _ClassVar[int]
    LOSS_FN_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    loss_fn_output_type: str
    loss_fn_outputs: _containers.RepeatedCompositeFieldContainer[ArrayRecord]
    metrics: _containers.ScalarMap[str, float]
    def __init__(
        self,
        loss_fn_output_type: str | None = ...,
        loss_fn_outputs: _Iterable[ArrayRecord | _Mapping] | None = ...,
        metrics: _Mapping[str, float] | None = ...,
    ) -> None: ...

class TopkLogprobs(_message.Message):
    __slots__ = ("k", "length", "logprobs", "token_ids")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    token_ids: bytes
    logprobs: bytes
    k: int
    length: int
    def __init__(
        self, token_ids: bytes | None = ..., logprobs: bytes | None = ..., k: int | None = ..., length: int | None = ...
    ) -> None: ...

class SampledSequence(_message.Message):
    __slots__ = ("logprobs", "stop_reason", "tokens", "topk_sampled_logprobs")
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOPK_SAMPLED_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    stop_reason: StopReason
    tokens: bytes
    logprobs: bytes
    topk_sampled_logprobs: TopkLogprobs
    def __init__(
        self,
        stop_reason: StopReason | str | None = ...,
        tokens: bytes | None = ...,
        logprobs: bytes | None = ...,
        topk_sampled_logprobs: TopkLogprobs | _Mapping | None = ...,
    ) -> None: ...

class SampleResponse(_message.Message):
    __slots__ = (
        "prompt_cache_hit_tokens",
        "prompt_logprobs",
        "sequences",
        "target_prompt_logprobs",
        "topk_prompt_logprobs",
    )
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOPK_PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_CACHE_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TARGET_PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.RepeatedCompositeFieldContainer[SampledSequence]
    prompt_logprobs: bytes
    topk_prompt_logprobs: TopkLogprobs
    prompt_cache_hit_tokens: int
    target_prompt_logprobs: Tensor
    def __init__(
        self,
        sequences: _Iterable[SampledSequence | _Mapping] | None = ...,
        prompt_logprobs: bytes | None = ...,
        topk_prompt_logprobs: TopkLogprobs | _Mapping | None = ...,
        prompt_cache_hit_tokens: int | None = ...,
        target_prompt_logprobs: Tensor | _Mapping | None = ...,
    ) -> None: ...
