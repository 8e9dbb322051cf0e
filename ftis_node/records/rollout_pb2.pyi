from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Codec(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CODEC_UNSPECIFIED: _ClassVar[Codec]
    CODEC_EXACT: _ClassVar[Codec]
    CODEC_TEXT: _ClassVar[Codec]

class Finish(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_UNSPECIFIED: _ClassVar[Finish]
    FINISH_STOP: _ClassVar[Finish]
    FINISH_LENGTH: _ClassVar[Finish]
    FINISH_ABORT: _ClassVar[Finish]
CODEC_UNSPECIFIED: Codec
CODEC_EXACT: Codec
CODEC_TEXT: Codec
FINISH_UNSPECIFIED: Finish
FINISH_STOP: Finish
FINISH_LENGTH: Finish
FINISH_ABORT: Finish

class Envelope(_message.Message):
    __slots__ = ("body", "signature")
    BODY_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    body: bytes
    signature: bytes
    def __init__(self, body: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Body(_message.Message):
    __slots__ = ("schema", "codec", "run", "sender", "number", "created_ms", "task", "prompt_index", "prompt_hash", "model", "tokenizer", "policy_version", "policy_version_span", "sampling", "lengths", "finishes", "rewards", "token_ids", "logprobs", "texts", "mean_logprobs", "retells", "version_offsets", "version_spans")
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    CREATED_MS_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    PROMPT_INDEX_FIELD_NUMBER: _ClassVar[int]
    PROMPT_HASH_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_SPAN_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    FINISHES_FIELD_NUMBER: _ClassVar[int]
    REWARDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    MEAN_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RETELLS_FIELD_NUMBER: _ClassVar[int]
    VERSION_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    VERSION_SPANS_FIELD_NUMBER: _ClassVar[int]
    schema: int
    codec: Codec
    run: bytes
    sender: bytes
    number: int
    created_ms: int
    task: str
    prompt_index: int
    prompt_hash: bytes
    model: str
    tokenizer: bytes
    policy_version: int
    policy_version_span: int
    sampling: Sampling
    lengths: _containers.RepeatedScalarFieldContainer[int]
    finishes: _containers.RepeatedScalarFieldContainer[Finish]
    rewards: _containers.RepeatedScalarFieldContainer[float]
    token_ids: bytes
    logprobs: bytes
    texts: _containers.RepeatedScalarFieldContainer[str]
    mean_logprobs: _containers.RepeatedScalarFieldContainer[float]
    retells: bytes
    version_offsets: _containers.RepeatedScalarFieldContainer[int]
    version_spans: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, schema: _Optional[int] = ..., codec: _Optional[_Union[Codec, str]] = ..., run: _Optional[bytes] = ..., sender: _Optional[bytes] = ..., number: _Optional[int] = ..., created_ms: _Optional[int] = ..., task: _Optional[str] = ..., prompt_index: _Optional[int] = ..., prompt_hash: _Optional[bytes] = ..., model: _Optional[str] = ..., tokenizer: _Optional[bytes] = ..., policy_version: _Optional[int] = ..., policy_version_span: _Optional[int] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., lengths: _Optional[_Iterable[int]] = ..., finishes: _Optional[_Iterable[_Union[Finish, str]]] = ..., rewards: _Optional[_Iterable[float]] = ..., token_ids: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., texts: _Optional[_Iterable[str]] = ..., mean_logprobs: _Optional[_Iterable[float]] = ..., retells: _Optional[bytes] = ..., version_offsets: _Optional[_Iterable[int]] = ..., version_spans: _Optional[_Iterable[int]] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ...) -> None: ...

class Announcement(_message.Message):
    __slots__ = ("schema", "id", "number", "envelope_bytes", "num_tokens", "tokenizer", "policy_version", "created_ms")
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ENVELOPE_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    CREATED_MS_FIELD_NUMBER: _ClassVar[int]
    schema: int
    id: bytes
    number: int
    envelope_bytes: int
    num_tokens: int
    tokenizer: bytes
    policy_version: int
    created_ms: int
    def __init__(self, schema: _Optional[int] = ..., id: _Optional[bytes] = ..., number: _Optional[int] = ..., envelope_bytes: _Optional[int] = ..., num_tokens: _Optional[int] = ..., tokenizer: _Optional[bytes] = ..., policy_version: _Optional[int] = ..., created_ms: _Optional[int] = ...) -> None: ...

class PeerRecord(_message.Message):
    __slots__ = ("body", "signature")
    BODY_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    body: bytes
    signature: bytes
    def __init__(self, body: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class PeerInfo(_message.Message):
    __slots__ = ("schema", "run", "peer", "name", "model", "parameters", "tokenizer", "role", "last_number", "policy_version", "tokens_per_s", "created_ms", "software")
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    LAST_NUMBER_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    CREATED_MS_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_FIELD_NUMBER: _ClassVar[int]
    schema: int
    run: bytes
    peer: bytes
    name: str
    model: str
    parameters: int
    tokenizer: bytes
    role: str
    last_number: int
    policy_version: int
    tokens_per_s: float
    created_ms: int
    software: str
    def __init__(self, schema: _Optional[int] = ..., run: _Optional[bytes] = ..., peer: _Optional[bytes] = ..., name: _Optional[str] = ..., model: _Optional[str] = ..., parameters: _Optional[int] = ..., tokenizer: _Optional[bytes] = ..., role: _Optional[str] = ..., last_number: _Optional[int] = ..., policy_version: _Optional[int] = ..., tokens_per_s: _Optional[float] = ..., created_ms: _Optional[int] = ..., software: _Optional[str] = ...) -> None: ...
