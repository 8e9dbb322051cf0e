"""Tiny random Qwen2 models for the tests of `generation`, and log-probs of plain forward passes."""

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from generation_fake_worker import checksum_of
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

import ftis_node
from ftis_node.generation.client import GenerationClient
from ftis_node.generation.engines.base import EngineSettings, GenerateRequest, GenerationResult
from ftis_node.generation.rollouts import completions_of as completions_of  # for the tests
from ftis_node.records.group import Completion, FinishReason, SamplingSettings
from ftis_node.workers.weight_store import PublishedWeights, WeightProof

VOCAB_SIZE = 90
EMBEDDING_ROWS = 96  # padded, as real models' embeddings are
EOS_ID = 7
NEVER: frozenset[int] = frozenset()  # no id ends a completion
STOP_IDS = tuple((first, second) for first in range(20, 40) for second in range(90))
PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 38, 46, 26], [43], [38, 32, 79, 50, 28, 84, 19, 71]]
PYTHON_PATH = f"{Path(__file__).parent}:{Path(ftis_node.__file__).parents[1]}"
SETTINGS = EngineSettings(vocab_size=EMBEDDING_ROWS, dtype="float32", device="cpu", seed=0)


def tiny_model(
    *,
    tied: bool = True,
    seed: int = 0,
    num_layers: int = 2,
    padded_rows_are_likely: bool = False,
    head_dim: int = 16,
    spread: float = 0.2,
) -> Any:
    """Return a random Qwen2 in float32 and eval mode.

    `spread` is the standard deviation of its weights. They are large enough that its tokens depend on the prompt;
    rounding errors grow with them.
    """
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=EMBEDDING_ROWS,
        hidden_size=4 * head_dim,
        intermediate_size=128,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        initializer_range=spread,
        eos_token_id=EOS_ID,
    )
    model = Qwen2ForCausalLM(config).eval()
    if padded_rows_are_likely:
        assert not tied
        with torch.no_grad():
            model.lm_head.weight[VOCAB_SIZE:] = model.lm_head.weight[:6] * 1.05
    return model


def save_model(folder: Path, **options: Any) -> Path:
    """Write a folder like one of the hub: weights, configuration, tokenizer. The options are those of `tiny_model`."""
    tiny_model(**options).save_pretrained(folder)
    vocab = {f"t{index}": index for index in range(VOCAB_SIZE)}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(vocab, unk_token="t0")), eos_token=f"t{EOS_ID}", unk_token="t0"
    ).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS_ID]}))
    return folder


def make_request(prompt_ids: Sequence[int], **options: Any) -> GenerateRequest:
    """Return a request with the tests' defaults: 4 completions of at most 16 tokens at temperature 1."""
    given = {
        "num_completions": 4, "sampling": SamplingSettings(), "max_tokens": 16, "eos_ids": frozenset({EOS_ID}),
        "seed": 1, **options,
    }  # fmt: skip
    return GenerateRequest(prompt_ids=tuple(prompt_ids), **given)


def assert_stopped(result: GenerationResult) -> None:
    """Assert that each completion ended with its first pair of `STOP_IDS`."""
    assert set(result.finish_reasons) == {FinishReason.STOP}
    for completion in completions_of(result):
        pairs = list(pairwise(completion.token_ids.tolist()))
        assert [pair in STOP_IDS for pair in pairs] == [False] * (len(pairs) - 1) + [True]


def fresh_logprobs(model: Any, prompt_ids: Sequence[int], completion: Completion, *, temperature: float = 1.0) -> Any:
    """Return log-probs `[T]` of a completion by one forward pass over prompt and completion, without a cache."""
    ids = torch.tensor([[*prompt_ids, *completion.token_ids.tolist()]])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt_ids) - 1 : -1].double()
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    return logprobs.gather(-1, ids[0, len(prompt_ids) :, None]).squeeze(-1).numpy()


def file_tensors(model: Any, *, with_head: bool = False) -> dict[str, torch.Tensor]:
    """Return a state dict as the learner publishes it. It omits a tied head, unless `with_head`."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings and not with_head:
        del state["lm_head.weight"]
    return state


def damage(path: Path, how: str) -> None:
    """Damage the published file at `path` in the way `how`, a key of `DAMAGES`."""
    tensors = load_file(path)
    name = "model.layers.1.mlp.up_proj.weight"
    match how:
        case "cut":
            path.write_bytes(path.read_bytes()[:-100])
        case "foreign":
            path.write_bytes(b"PK" + bytes(200))
        case "unmarked":
            (path.parent / "COMPLETE").unlink()
        case "gone":
            path.unlink()
        case "lacks":
            del tensors[name]
        case "unknown":
            tensors["model.layers.7.mlp.up_proj.weight"] = tensors[name].clone()
        case "shape":
            tensors[name] = tensors[name][:-1].contiguous()
        case "integers":
            tensors[name] = tensors[name].to(torch.int32)
    if how in ("lacks", "unknown", "shape", "integers"):
        save_file(tensors, path)


DAMAGES = {
    "cut": "is damaged: .* bytes instead of", "foreign": "is damaged", "unmarked": "incomplete",
    "gone": "is damaged: .*No such file", "lacks": r"lacks model\.layers\.1\.mlp\.up_proj",
    "unknown": r"names unknown model\.layers\.7", "shape": "another shape", "integers": "integers",
}  # fmt: skip


CLOSE = 1e-3  # nats; two random models differ by far more on some token


def mixed_logprobs(old: Any, new: Any, prompt: list[int], token_ids: list[int], num_old: int) -> Any:
    """Return log-probs `[T]` of tokens of which `old` sampled the first `num_old` and `new` the others.

    All positions before the last token of `old` keep the cache of `old`, because an engine does not recompute it.
    """
    ids = torch.tensor([[*prompt, *token_ids]])
    begin = len(prompt) + num_old - 1  # the position that predicts the first token of `new`
    with torch.no_grad():
        before = old(input_ids=ids[:, : max(begin, 1)], use_cache=True)
        logits = before.logits[0, len(prompt) - 1 :]
        after = new(input_ids=ids[:, begin:], past_key_values=before.past_key_values, use_cache=True)
        logits = torch.cat([logits, after.logits[0]])[: len(token_ids)]
    logprobs = torch.log_softmax(logits.double(), dim=-1)
    return logprobs.gather(-1, ids[0, len(prompt) :, None]).squeeze(-1).numpy()


def num_sampled_by_old(old: Any, new: Any, prompt: list[int], token_ids: list[int], logprobs: Any) -> list[int]:
    """Return each possible number of first tokens that `old` sampled, given the engine's log-probs.

    The tokens on which a plain pass of `old` agrees are an upper bound. A few of them may agree by chance.
    """
    wrong = np.abs(mixed_logprobs(old, old, prompt, token_ids, len(token_ids)) - logprobs) > CLOSE
    most = int(wrong.argmax()) if wrong.any() else len(token_ids)
    return [
        number
        for number in range(max(1, most - 2), most + 1)
        if np.abs(mixed_logprobs(old, new, prompt, token_ids, number) - logprobs).max() < CLOSE
    ]


def publish(folder: Path, version: int, content: str, *, tensor: str = "packed") -> PublishedWeights:
    """Write a "weights file" of the fake worker. Only the tensor `number` has a checksum that the worker reports."""
    path = folder / f"weights-{version}"
    path.write_text(content)
    checksums = {tensor: checksum_of(float(content))} if content != "damaged" else {}
    return PublishedWeights(version=version, path=str(path), num_bytes=len(content), checksums=checksums)


def proof(version: int, value: float) -> WeightProof:
    """Return the learner's log-probs for a probe of three tokens."""
    return WeightProof(version=version, probe_ids=(1, 2, 3), logprobs=(value, value))


async def generate_group(client: GenerationClient, *, prompt_ids: tuple[int, ...] = (4, 5)) -> Any:
    """Request a group of three completions."""
    return await client.generate(make_request(prompt_ids, num_completions=3, max_tokens=8, seed=None))


async def make_group(client: GenerationClient, prompt_ids: Sequence[int], *, max_tokens: int = 12) -> Any:
    """Request four completions, which end at their token limit."""
    return await client.generate(make_request(prompt_ids, max_tokens=max_tokens, eos_ids=NEVER, seed=None))
