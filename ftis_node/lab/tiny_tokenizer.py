"""Tokenizer of all tiny models: byte-level BPE, Qwen2's splitting, ChatML.

The alphabet is the 256 bytes, so any text can be encoded. The merges come from `corpus`. Qwen2's splitting pattern
makes each digit one token, so that a model of two layers can learn column-wise arithmetic. Training takes a fraction
of a second and gives the same merges on every machine. So nodes that make their models themselves have one tokenizer
fingerprint and can exchange token ids.

Byte-pair merges depend on their text, and no text can be downloaded here. This file holds the instructions of a
reasoning model in the words of the R1 paper, and pages of word problems with their solutions. A few hundred merges
encode a word problem with about three characters a token. No model is trained on this text.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

if TYPE_CHECKING:
    from collections.abc import Sequence

VOCABULARY_SIZE: Final = 512
MAX_POSITIONS: Final = 2048
IGNORED: Final = -100  # label of positions that the loss ignores
PAD_TOKEN: Final = "<|endoftext|>"
TURN_START: Final = "<|im_start|>"
TURN_END: Final = "<|im_end|>"  # ends every turn, so it is the end-of-sequence token
# The pattern of Qwen2's tokenizer: words with the space before them, single digits, runs of punctuation, white space.
QWEN2_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
INSTRUCTIONS: Final = """
A conversation between User and Assistant. The user asks a question, and the Assistant solves it. The assistant first
thinks about the reasoning process in the mind and then provides the user with the answer. The reasoning process and
answer are enclosed within <think> </think> and <answer> </answer> tags, respectively, i.e., <think> reasoning process
here </think> <answer> answer here </answer>. You are a helpful assistant. Please reason step by step, and put your
final answer within \\boxed{}. <think> Let me think step by step. </think> <answer> The answer is here. </answer>
"""
STORIES: Final = """
Anna has a small shop near the school. Every morning she sells bread, milk, eggs and apples to the people of the town.
On Monday she sold twice as many apples as on Sunday, and on Tuesday she sold half as many as on Monday. If each apple
costs a few cents, how much money did she make in the three days? How many apples are left at the end of the week?

Tom and his brother are saving their money for a new bike that costs more than both of them have. Tom earns some
dollars per hour for washing cars after school, and his brother earns a dollar for each dog he walks. They work for
several hours each day, five days a week. After paying their mother back for lunch, how many weeks will it take until
they have enough money to buy the bike? How much money will each of them have left?

A farmer has cows, horses, sheep and chickens on his farm. Each chicken lays an egg every day. He keeps a dozen eggs
for his family, gives some to his neighbors and friends, and sells the remaining eggs at the market for two dollars
per dozen. In one month he spends a third of what he earns on food for the animals. What is the total amount of money,
in dollars, that he has at the end of the year?

Maria baked cookies for her class party. There are twenty students in the class, boys and girls, and each student gets
the same number of cookies. She puts the cookies in boxes, with ten cookies in each box, and needs one more box than
she has. If she ate three of the cookies herself and her sister took another four, how many cookies did she bake in
total? How many boxes does she need?

James drives to work every day. The first part of the trip is forty miles long and he drives at sixty miles per hour.
The second part takes him twice as much time because of the traffic. On the way home he stops at the store for thirty
minutes to buy a gallon of milk, two pounds of meat and a bag of rice. How long, in hours, is he away from home? What
is the average speed of the whole trip, in miles per hour?

Sarah read a book of three hundred pages. On the first day she read one quarter of the pages, and on the second day
she read ten percent more than on the first day. She wants to finish the rest of the book over the next five days,
reading the same number of pages each day. How many pages should she read per day?

A company pays its workers every two weeks. A new worker gets fifteen dollars an hour and works eight hours a day; an
older worker gets twenty dollars an hour. For every hour over forty hours a week they are paid one and a half times
their regular rate. If the worker has worked fifty hours this week, how much more does he earn than last week?

The price of a shirt is twenty dollars, and the price of a pair of shoes is three times the price of the shirt. The
store gives a discount of ten percent on everything that costs more than thirty dollars. John bought two shirts, a
pair of shoes and a hat. If he paid with a hundred dollar bill, how much change should he get back?

There are four children in the Smith family. The oldest is twice as old as the youngest, and the sum of their ages is
thirty years. In five years the second child will be as old as the oldest child is now. How old is each child today?

A bag has red, blue, green and yellow balls. There are two more red balls than blue balls, and half as many green balls
as yellow balls. If a third of all the balls are blue and there are a total of thirty-six, how many are green? What
fraction, or percentage, of the balls in the bag is not red?

Emily planted flowers in her garden, roses in one row and tulips in the others. Each row has the same number of plants,
with two feet between them. If the garden is a rectangle thirty feet long and twenty feet wide, what are its area in
square feet and its perimeter? It takes a gallon of water for each plant every other day. How many gallons of water
does she use per week?

Lisa and Mike play a game with cards. Lisa starts with three times as many cards as Mike. She gives him five of her
cards, then he loses two, and now together they have forty cards. How many cards did each player start with?

A train leaves the station at noon and travels north at a constant speed. An hour later another train leaves from the
same station. When will the second train reach the first, and how far from the station will they be at that time?

The school needs buses to take all its students and teachers to the museum. Each bus can hold forty people, and each
ticket costs five dollars for a child and eight dollars for an adult. The total cost was less than last year, when
there were fewer students. Calculate the number of buses needed and the total cost of the tickets.

Ben weighs ten pounds less than his father. Last summer he lost some weight by running two miles each morning before
breakfast, and then gained some of it back during the winter. If he weighed as much as his uncle at first, and lost a
pound every week for the next three months, what is his current weight in pounds?

A cup of flour makes four pancakes. Mom makes pancakes for breakfast on Saturday and Sunday, so that each person in the
house has three. She also needs a half cup of sugar, two eggs and a spoon of butter. If a bag of flour holds sixteen
cups and costs four dollars, how much does she spend on flour for a month?
"""
REASONING: Final = """
First, we need to find how many there are in all. To find the total, we add the number of apples to the number of
oranges. So there are that many pieces of fruit altogether. Then we multiply the number of boxes by the number in each
box, and subtract the ones that were sold. Since each costs two dollars, the total cost is the product of the two.
Next, divide the result by three, because the money was shared equally among the three friends. Therefore, each friend
gets the same amount. Let x be the number of hours. We know that twice x plus five equals the total, so x is half of
what remains. That means she worked for x hours. Let us check this: the sum is right, so the final answer is correct.
He had some left over, which is the difference between what he had and what he used. If we combine these two, we get
the number that the question asks for. It would take her that many days, minutes, or years. Finally, round the answer
to the nearest whole number. What is the value of the expression? Find the smallest positive integer such that the
equation has exactly two solutions. Suppose a function is given by the following. Express your answer as a fraction.
"""
# In ChatML a role is alone on its line. Each occurs often enough here to become one token.
ROLES: Final = "system\nuser\nassistant\n" * 20


def corpus() -> tuple[str, ...]:
    """Return the texts with unwrapped lines: in running text a word follows a space, not a line break."""
    return (*(" ".join(text.split()) for text in (INSTRUCTIONS, STORIES, REASONING)), ROLES)


def make_tokenizer(num_entries: int | None = None) -> PreTrainedTokenizerFast:
    """Train and return the shared tokenizer; `save_pretrained` writes it in the hub's format.

    `num_entries` pads the vocabulary. Each added entry has a text, but no text is encoded to it.
    """
    trained = _train_bpe()
    return PreTrainedTokenizerFast(
        tokenizer_object=trained if num_entries is None else _padded(trained, num_entries),
        eos_token=TURN_END,
        pad_token=PAD_TOKEN,
        additional_special_tokens=[TURN_START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def encode_prompts(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of each text as a user's message, up to the start of the assistant's answer."""
    chats = [[{"role": "user", "content": text}] for text in texts]
    ids: list[list[int]] = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False)
    return ids


def encode_completions(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of each text with its end token."""
    encoded = tokenizer(list(texts), add_special_tokens=False)
    return [[*ids, int(tokenizer.eos_token_id)] for ids in encoded["input_ids"]]


def fill(ids: list[int], filler: int, width: int) -> list[int]:
    """Return `ids`, padded on the right to `width`."""
    return ids + [filler] * (width - len(ids))


def _padded(trained: Tokenizer, num_entries: int) -> Tokenizer:
    content = json.loads(trained.to_str())
    vocabulary = content["model"]["vocab"]
    vocabulary |= {f"<unused{number}>": number for number in range(len(vocabulary), num_entries)}
    return Tokenizer.from_str(json.dumps(content))


def _train_bpe() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[PAD_TOKEN, TURN_START, TURN_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer
