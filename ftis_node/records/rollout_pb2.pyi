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
    CODEC_LOSSLESS: _ClassVar[Codec]
    CODEC_LOSSY: _ClassVar[Codec]

class Finish(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_UNSPECIFIED: _ClassVar[Finish]
    FINISH_STOP: _ClassVar[Finish]
    FINISH_LENGTH: _ClassVar[Finish]
    FINISH_ABORT: _ClassVar[Finish]

class WeightsPart(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WEIGHTS_PART_UNSPECIFIED: _ClassVar[WeightsPart]
    WEIGHTS_PART_OFFER: _ClassVar[WeightsPart]
    WEIGHTS_PART_HASHES: _ClassVar[WeightsPart]
    WEIGHTS_PART_CHUNKS: _ClassVar[WeightsPart]
CODEC_UNSPECIFIED: Codec
CODEC_EXACT: Codec
CODEC_TEXT: Codec
CODEC_LOSSLESS: Codec
CODEC_LOSSY: Codec
FINISH_UNSPECIFIED: Finish
FINISH_STOP: Finish
FINISH_LENGTH: Finish
FINISH_ABORT: Finish
WEIGHTS_PART_UNSPECIFIED: WeightsPart
WEIGHTS_PART_OFFER: WeightsPart
WEIGHTS_PART_HASHES: WeightsPart
WEIGHTS_PART_CHUNKS: WeightsPart

class Envelope(_message.Message):
    __slots__ = ("body", "signature")
    BODY_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    body: bytes
    signature: bytes
    def __init__(self, body: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Body(_message.Message):
    __slots__ = ("schema", "codec", "run", "sender", "number", "created_ms", "task", "prompt_index", "problem_hash", "model", "tokenizer", "policy_version", "policy_version_span", "sampling", "lengths", "finishes", "rewards", "token_ids", "logprobs", "texts", "mean_logprobs", "exact_group", "version_offsets", "version_spans", "id_planes", "logprob_planes", "turns", "turn_lengths", "observation_hash", "weights_of", "prompt_hash", "end_ids", "opening")
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    CREATED_MS_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    PROMPT_INDEX_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_HASH_FIELD_NUMBER: _ClassVar[int]
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
    EXACT_GROUP_FIELD_NUMBER: _ClassVar[int]
    VERSION_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    VERSION_SPANS_FIELD_NUMBER: _ClassVar[int]
    ID_PLANES_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_PLANES_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    TURN_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    OBSERVATION_HASH_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_OF_FIELD_NUMBER: _ClassVar[int]
    PROMPT_HASH_FIELD_NUMBER: _ClassVar[int]
    END_IDS_FIELD_NUMBER: _ClassVar[int]
    OPENING_FIELD_NUMBER: _ClassVar[int]
    schema: int
    codec: Codec
    run: bytes
    sender: bytes
    number: int
    created_ms: int
    task: str
    prompt_index: int
    problem_hash: bytes
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
    exact_group: bytes
    version_offsets: _containers.RepeatedScalarFieldContainer[int]
    version_spans: _containers.RepeatedScalarFieldContainer[int]
    id_planes: _containers.RepeatedScalarFieldContainer[bytes]
    logprob_planes: _containers.RepeatedScalarFieldContainer[bytes]
    turns: _containers.RepeatedScalarFieldContainer[int]
    turn_lengths: _containers.RepeatedScalarFieldContainer[int]
    observation_hash: bytes
    weights_of: bytes
    prompt_hash: bytes
    end_ids: _containers.RepeatedScalarFieldContainer[int]
    opening: str
    def __init__(self, schema: _Optional[int] = ..., codec: _Optional[_Union[Codec, str]] = ..., run: _Optional[bytes] = ..., sender: _Optional[bytes] = ..., number: _Optional[int] = ..., created_ms: _Optional[int] = ..., task: _Optional[str] = ..., prompt_index: _Optional[int] = ..., problem_hash: _Optional[bytes] = ..., model: _Optional[str] = ..., tokenizer: _Optional[bytes] = ..., policy_version: _Optional[int] = ..., policy_version_span: _Optional[int] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., lengths: _Optional[_Iterable[int]] = ..., finishes: _Optional[_Iterable[_Union[Finish, str]]] = ..., rewards: _Optional[_Iterable[float]] = ..., token_ids: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., texts: _Optional[_Iterable[str]] = ..., mean_logprobs: _Optional[_Iterable[float]] = ..., exact_group: _Optional[bytes] = ..., version_offsets: _Optional[_Iterable[int]] = ..., version_spans: _Optional[_Iterable[int]] = ..., id_planes: _Optional[_Iterable[bytes]] = ..., logprob_planes: _Optional[_Iterable[bytes]] = ..., turns: _Optional[_Iterable[int]] = ..., turn_lengths: _Optional[_Iterable[int]] = ..., observation_hash: _Optional[bytes] = ..., weights_of: _Optional[bytes] = ..., prompt_hash: _Optional[bytes] = ..., end_ids: _Optional[_Iterable[int]] = ..., opening: _Optional[str] = ...) -> None: ...

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
    __slots__ = ("schema", "id", "number", "envelope_bytes", "num_tokens", "tokenizer", "policy_version", "created_ms", "attempt", "sender", "more_ids", "more_envelope_bytes", "more_num_tokens", "more_created_ms")
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ENVELOPE_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    CREATED_MS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    MORE_IDS_FIELD_NUMBER: _ClassVar[int]
    MORE_ENVELOPE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MORE_NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MORE_CREATED_MS_FIELD_NUMBER: _ClassVar[int]
    schema: int
    id: bytes
    number: int
    envelope_bytes: int
    num_tokens: int
    tokenizer: bytes
    policy_version: int
    created_ms: int
    attempt: int
    sender: bytes
    more_ids: _containers.RepeatedScalarFieldContainer[bytes]
    more_envelope_bytes: _containers.RepeatedScalarFieldContainer[int]
    more_num_tokens: _containers.RepeatedScalarFieldContainer[int]
    more_created_ms: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, schema: _Optional[int] = ..., id: _Optional[bytes] = ..., number: _Optional[int] = ..., envelope_bytes: _Optional[int] = ..., num_tokens: _Optional[int] = ..., tokenizer: _Optional[bytes] = ..., policy_version: _Optional[int] = ..., created_ms: _Optional[int] = ..., attempt: _Optional[int] = ..., sender: _Optional[bytes] = ..., more_ids: _Optional[_Iterable[bytes]] = ..., more_envelope_bytes: _Optional[_Iterable[int]] = ..., more_num_tokens: _Optional[_Iterable[int]] = ..., more_created_ms: _Optional[_Iterable[int]] = ...) -> None: ...

class Question(_message.Message):
    __slots__ = ("schema", "sender", "first_number", "last_number", "since_ms")
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    FIRST_NUMBER_FIELD_NUMBER: _ClassVar[int]
    LAST_NUMBER_FIELD_NUMBER: _ClassVar[int]
    SINCE_MS_FIELD_NUMBER: _ClassVar[int]
    schema: int
    sender: bytes
    first_number: int
    last_number: int
    since_ms: int
    def __init__(self, schema: _Optional[int] = ..., sender: _Optional[bytes] = ..., first_number: _Optional[int] = ..., last_number: _Optional[int] = ..., since_ms: _Optional[int] = ...) -> None: ...

class PeerRecord(_message.Message):
    __slots__ = ("body", "signature")
    BODY_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    body: bytes
    signature: bytes
    def __init__(self, body: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class PeerInfo(_message.Message):
    __slots__ = ("schema", "run", "peer", "name", "model", "parameters", "tokenizer", "role", "last_number", "policy_version", "tokens_per_s", "created_ms", "software", "read_shards", "domain", "stats", "grader", "transformers", "template")
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
    READ_SHARDS_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    GRADER_FIELD_NUMBER: _ClassVar[int]
    TRANSFORMERS_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_FIELD_NUMBER: _ClassVar[int]
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
    read_shards: int
    domain: str
    stats: PeerStats
    grader: str
    transformers: str
    template: bytes
    def __init__(self, schema: _Optional[int] = ..., run: _Optional[bytes] = ..., peer: _Optional[bytes] = ..., name: _Optional[str] = ..., model: _Optional[str] = ..., parameters: _Optional[int] = ..., tokenizer: _Optional[bytes] = ..., role: _Optional[str] = ..., last_number: _Optional[int] = ..., policy_version: _Optional[int] = ..., tokens_per_s: _Optional[float] = ..., created_ms: _Optional[int] = ..., software: _Optional[str] = ..., read_shards: _Optional[int] = ..., domain: _Optional[str] = ..., stats: _Optional[_Union[PeerStats, _Mapping]] = ..., grader: _Optional[str] = ..., transformers: _Optional[str] = ..., template: _Optional[bytes] = ...) -> None: ...

class PeerStats(_message.Message):
    __slots__ = ("step", "groups_per_minute", "refused_groups", "pass_rates", "sources", "trained_groups", "refused_senders", "receipts")
    STEP_FIELD_NUMBER: _ClassVar[int]
    GROUPS_PER_MINUTE_FIELD_NUMBER: _ClassVar[int]
    REFUSED_GROUPS_FIELD_NUMBER: _ClassVar[int]
    PASS_RATES_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    TRAINED_GROUPS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_SENDERS_FIELD_NUMBER: _ClassVar[int]
    RECEIPTS_FIELD_NUMBER: _ClassVar[int]
    step: int
    groups_per_minute: float
    refused_groups: int
    pass_rates: _containers.RepeatedCompositeFieldContainer[PassRate]
    sources: _containers.RepeatedCompositeFieldContainer[GroupSource]
    trained_groups: int
    refused_senders: _containers.RepeatedCompositeFieldContainer[RefusedSender]
    receipts: _containers.RepeatedCompositeFieldContainer[Receipt]
    def __init__(self, step: _Optional[int] = ..., groups_per_minute: _Optional[float] = ..., refused_groups: _Optional[int] = ..., pass_rates: _Optional[_Iterable[_Union[PassRate, _Mapping]]] = ..., sources: _Optional[_Iterable[_Union[GroupSource, _Mapping]]] = ..., trained_groups: _Optional[int] = ..., refused_senders: _Optional[_Iterable[_Union[RefusedSender, _Mapping]]] = ..., receipts: _Optional[_Iterable[_Union[Receipt, _Mapping]]] = ...) -> None: ...

class Receipt(_message.Message):
    __slots__ = ("key", "groups", "tokens")
    KEY_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    groups: int
    tokens: int
    def __init__(self, key: _Optional[bytes] = ..., groups: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...

class RefusedSender(_message.Message):
    __slots__ = ("peer", "reason", "groups")
    PEER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    peer: bytes
    reason: str
    groups: int
    def __init__(self, peer: _Optional[bytes] = ..., reason: _Optional[str] = ..., groups: _Optional[int] = ...) -> None: ...

class PassRate(_message.Message):
    __slots__ = ("step", "pass_at_1")
    STEP_FIELD_NUMBER: _ClassVar[int]
    PASS_AT_1_FIELD_NUMBER: _ClassVar[int]
    step: int
    pass_at_1: float
    def __init__(self, step: _Optional[int] = ..., pass_at_1: _Optional[float] = ...) -> None: ...

class GroupSource(_message.Message):
    __slots__ = ("peer", "groups")
    PEER_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    peer: bytes
    groups: int
    def __init__(self, peer: _Optional[bytes] = ..., groups: _Optional[int] = ...) -> None: ...

class WeightsQuestion(_message.Message):
    __slots__ = ("schema", "part", "file", "first", "count")
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    schema: int
    part: WeightsPart
    file: bytes
    first: int
    count: int
    def __init__(self, schema: _Optional[int] = ..., part: _Optional[_Union[WeightsPart, str]] = ..., file: _Optional[bytes] = ..., first: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class WeightsOffer(_message.Message):
    __slots__ = ("body", "signature")
    BODY_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    body: bytes
    signature: bytes
    def __init__(self, body: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class WeightsInfo(_message.Message):
    __slots__ = ("schema", "run", "peer", "version", "created_ms", "model", "tokenizer", "num_bytes", "sha256", "chunk_bytes", "chunks_sha256", "probe_ids", "probe_logprobs", "adapter_config", "started_from")
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CREATED_MS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_SHA256_FIELD_NUMBER: _ClassVar[int]
    PROBE_IDS_FIELD_NUMBER: _ClassVar[int]
    PROBE_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_CONFIG_FIELD_NUMBER: _ClassVar[int]
    STARTED_FROM_FIELD_NUMBER: _ClassVar[int]
    schema: int
    run: bytes
    peer: bytes
    version: int
    created_ms: int
    model: str
    tokenizer: bytes
    num_bytes: int
    sha256: bytes
    chunk_bytes: int
    chunks_sha256: bytes
    probe_ids: _containers.RepeatedScalarFieldContainer[int]
    probe_logprobs: _containers.RepeatedScalarFieldContainer[float]
    adapter_config: bytes
    started_from: bytes
    def __init__(self, schema: _Optional[int] = ..., run: _Optional[bytes] = ..., peer: _Optional[bytes] = ..., version: _Optional[int] = ..., created_ms: _Optional[int] = ..., model: _Optional[str] = ..., tokenizer: _Optional[bytes] = ..., num_bytes: _Optional[int] = ..., sha256: _Optional[bytes] = ..., chunk_bytes: _Optional[int] = ..., chunks_sha256: _Optional[bytes] = ..., probe_ids: _Optional[_Iterable[int]] = ..., probe_logprobs: _Optional[_Iterable[float]] = ..., adapter_config: _Optional[bytes] = ..., started_from: _Optional[bytes] = ...) -> None: ...
