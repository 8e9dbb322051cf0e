"""An ensemble in memory that answers questions, and remembers the conversation.

A mixture gives one answer, token by token from all models. With the modes vote and confidence each model answers, then
one of the answers is chosen as in an evaluation. All models remember the ensemble's answers, not their own.

A vote needs equal answers, and a question outside of a task has no parser for its answers. So votes compare the content
of the answer blocks. Without such a block, they compare all words after the reasoning.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from operator import itemgetter

from ftis_node.errors import OutOfMemoryError, says_out_of_memory
from ftis_node.evaluation.ensemble import check_mixture, check_models_fit
from ftis_node.evaluation.evaluate import Expert, load_experts
from ftis_node.evaluation.result import elect
from ftis_node.evaluation.saved_ensemble import Ensemble, mixture_weights
from ftis_node.generation.chat_model import ChatAnswer, ChatSettings, OnText, too_long
from ftis_node.generation.engines.base import Engine, EngineSettings, GenerateRequest
from ftis_node.generation.engines.mixture_engine import MixtureEngine, load_mixture
from ftis_node.generation.engines.torch_engine import TorchEngine, load_served_model
from ftis_node.models import PromptSettings
from ftis_node.records.group import FinishReason, SamplingSettings
from ftis_node.records.think_block import after_thinking
from ftis_node.tasks.answers import final_answer, plain_text
from ftis_node.telemetry.log import OnProgress, unwatched


class EnsembleChat:
    """The models of an ensemble and their conversation. It has the interface of `ChatModel`."""

    role = "ensemble"

    def __init__(
        self,
        ensemble: Ensemble,
        *,
        systems: Callable[[str], str],
        prompts: PromptSettings,
        settings: ChatSettings,
        on_progress: OnProgress = unwatched,
    ) -> None:
        """Load the models. `systems` returns the system message of a model's folder.

        Raises ModelError, NetworkError, ConfigError for a mixture of different tokenizers, and MachineError.
        """
        self._ensemble, self._settings = ensemble, settings
        self._experts = load_experts(ensemble.members, prompts, on_progress)
        sources = [expert.source for expert in self._experts]
        self.name = f"{ensemble.mode} of {', '.join(source.name for source in sources)}"
        hows = [EngineSettings(vocab_size=each.tokenizer.vocab_size, device=settings.device) for each in self._experts]
        self._engine_settings = hows
        if ensemble.is_mixture:
            check_mixture(self._experts, max_tokens=settings.max_tokens, num_rows=1, device=settings.device)
            self._models = load_mixture(sources, hows[0], on_progress=on_progress)
        else:
            check_models_fit(sources, max_tokens=settings.max_tokens, num_rows=len(sources), device=settings.device)
            on_progress(None, f"loading {self.name}")
            self._models = [load_served_model(source, how) for source, how in zip(sources, hows, strict=True)]
        self._systems = [systems(expert.member.model) for expert in self._experts]
        self._history: list[dict[str, str]] = []

    def reset(self) -> None:
        """Forget the conversation."""
        self._history.clear()

    def ask(self, question: str, *, on_text: OnText | None = None) -> ChatAnswer:
        """Return the answer, and pass its text to `on_text` at once.

        Raises ModelError if the conversation is too long for a model, and OutOfMemoryError.
        """
        turn = {"role": "user", "content": question}
        try:
            answer = asyncio.run(self._answer([*self._history, turn]))
        except RuntimeError as error:
            if not says_out_of_memory(str(error)):
                raise
            raise OutOfMemoryError("the GPU's memory is full: add --device cpu, or ask fewer models") from error
        if on_text is not None:
            on_text(answer.text)
        self._history += [turn, {"role": "assistant", "content": answer.text.strip()}]
        return answer

    async def _answer(self, messages: Sequence[dict[str, str]]) -> ChatAnswer:
        """Open the engines, which belong to an event loop, on the loaded models."""
        if self._ensemble.is_mixture:
            weights = mixture_weights(self._ensemble.mode, self._ensemble.weights)
            engines: list[Engine] = [MixtureEngine(self._models, self._engine_settings[0], weights)]
        else:
            engines = [TorchEngine(*each) for each in zip(self._models, self._engine_settings, strict=True)]
        try:
            asked = zip(engines, self._experts, self._systems, strict=False)
            replies = [await self._reply(*each, messages) for each in asked]
        finally:
            for engine in engines:
                await engine.close()
        if self._ensemble.mode == "vote":
            chosen = elect([(answer_of(answer.text), mean_logprob) for answer, mean_logprob in replies])
            assert chosen is not None, "an ensemble has models"
            return replies[chosen][0]
        return max(replies, key=itemgetter(1))[0]

    async def _reply(
        self, engine: Engine, expert: Expert, system: str, messages: Sequence[dict[str, str]]
    ) -> tuple[ChatAnswer, float]:
        """Return an answer and its mean log-prob."""
        is_mixture, tokenizer = self._ensemble.is_mixture, expert.tokenizer
        experts = self._experts if is_mixture else [expert]
        first = [{"role": "system", "content": system}] if system else []
        prompt = tokenizer.render_prompt([*first, *messages])
        max_tokens = self._settings.max_tokens
        for each in experts:
            context = each.source.num_positions
            max_tokens = min(max_tokens, max_tokens if context is None else context - len(prompt.token_ids))
            if max_tokens < 1:
                raise too_long(each.source.name, len(prompt.token_ids), context)
        result = await engine.generate(
            GenerateRequest(
                prompt_ids=prompt.token_ids,
                num_completions=1,
                sampling=SamplingSettings(temperature=self._settings.temperature),
                max_tokens=max_tokens,
                eos_ids=frozenset(token for each in experts for token in each.tokenizer.end_ids),
            )
        )
        (ids,), (logprobs,) = result.tokens.ids_of_each(), result.tokens.logprobs_of_each()
        text = prompt.opening + tokenizer.decode(ids.tolist())
        is_cut = result.finish_reasons[0] is FinishReason.LENGTH
        answer = ChatAnswer(text, len(ids), is_cut, None if is_mixture else expert.source.name)
        return answer, float(logprobs.mean())


def answer_of(text: str) -> str | None:
    """Return what is compared in a vote; None if the text has no answer."""
    return final_answer(text) or plain_text(after_thinking(text))
