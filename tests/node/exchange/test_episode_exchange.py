"""Episodes of a trainer on a real exchange node: it plays the turns again, and publishes what any node would."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ftis_node.models import PromptTokenizer
from ftis_node.node.exchange.trainer_messages import OwnGroup, PublishedGroup
from ftis_node.node.loops.publish import VALIDATION
from ftis_node.records.codec import hash_messages, hash_observations, hash_prompt
from ftis_node.records.group import FinishReason
from ftis_node.validation import Refusal
from tests.conftest import with_sections
from tests.episodes.played import ITEM, RUN, TASK
from tests.node.exchange.parts import exchanging, own_group, tokenizer_ids
from tests.node.exchange.test_trainer_exchange import first_published

WON = ITEM.answer
GAMES = [[WON], ["1", WON], ["1", "99", "2", WON], *[["1", "no", "2", "3"]] * 5]
CUT = [11, 12] * 4  # a turn without an end, of the longest length


def offered(tokenizer: PromptTokenizer, games: Sequence[Sequence[str]], *, stop: str = "", **changes: Any) -> OwnGroup:
    """Return the games as a group. A turn with the text `stop` has no end token."""
    turns = [[tokenizer_ids(tokenizer, text)[: -1 if text == stop else None] for text in game] for game in games]
    turns[-1][-1] = CUT
    ids = [token for game in turns for turn in game for token in turn]
    fields: dict[str, Any] = {
        "problem_hash": hash_messages(ITEM.prompt),
        "prompt_ids": np.array(tokenizer.encode_prompt(ITEM.prompt), "<i4").tobytes(),
        "token_ids": np.array(ids, "<i4").tobytes(),
        "logprobs": np.linspace(-0.5, -0.1, len(ids), dtype="<f4").tobytes(),
        "lengths": [sum(map(len, game)) for game in turns],
        "turn_lengths": [list(map(len, game)) for game in turns],
        "observation_form": list(tokenizer.observation_form),
    }
    return own_group(tokenizer, [], problem=ITEM.ref.index, **fields | changes)


async def test_episodes_are_published_as_any_node_would_or_refused_before_validation(tmp_path):
    async with exchanging(tmp_path / "plain") as (node, exchange):
        refused = await exchange.publish(own_group(node.tokenizer, ["1", "2"], turn_lengths=[[2], [2]]))
        assert isinstance(refused, Refusal) and refused.reason == "episode_mismatch"
    async with exchanging(tmp_path, manifest=RUN) as (node, exchange):
        given = offered(node.tokenizer, GAMES)
        [first, second, *others] = given.turn_lengths
        for changes, reason in (
            ({"games": [[WON, "1"], *GAMES[1:]]}, "episode_mismatch"),
            ({"games": [["1"], *GAMES[1:]]}, "episode_mismatch"),
            ({"games": [["1"] * 5, *GAMES[1:]]}, "episode_mismatch"),
            ({"turn_lengths": []}, "episode_mismatch"),
            ({"turn_lengths": [[1] * sum(first), second, *others]}, "finish_reason"),
            ({"turn_lengths": [first, [sum(second)], *others]}, "finish_reason"),
            ({"turn_lengths": [first, [*second, 1], *others]}, "malformed"),
            ({"turn_lengths": [first, second]}, "malformed"),
        ):
            refused = await exchange.publish(offered(node.tokenizer, **{"games": GAMES} | changes))
            assert isinstance(refused, Refusal)
            assert refused.reason == reason, (changes, refused)
        assert node.context.failures.streak(VALIDATION).num_in_row == 0, "a group reached validation"

        plays = [TASK.play(ITEM, game) for game in GAMES]
        assert await exchange.publish(given) == PublishedGroup(1, [play.reward for play in plays])
        group = first_published(node)
        assert group.finish_reasons == (*[FinishReason.STOP] * 7, FinishReason.LENGTH)
        assert [list(turns) for turns in group.turn_lengths] == given.turn_lengths
        prompt_ids = node.tokenizer.encode_prompt(ITEM.prompt)
        assert group.prompt_hash == hash_prompt(prompt_ids, node.tokenizer.observation_form)
        between = [play.observations[: len(game) - 1] for play, game in zip(plays, GAMES, strict=True)]
        assert group.observation_hash == hash_observations(between)
    with_stop = with_sections(RUN, episode={"stop": (WON, "9")})
    async with exchanging(tmp_path / "stop", manifest=with_stop) as (node, exchange):
        assert isinstance(await exchange.publish(offered(node.tokenizer, GAMES[:1] * 8, stop=WON)), PublishedGroup)
        assert set(first_published(node).finish_reasons) == {FinishReason.STOP, FinishReason.LENGTH}
        refused = await exchange.publish(offered(node.tokenizer, GAMES, stop=WON))  # the turn 99
        assert isinstance(refused, Refusal)
        assert (refused.reason, refused.detail) == ("episode_mismatch", "turn 2 goes on after a stop string")
