"""The scored text of an answer: special tokens are seen, ends are events, and openings of the template count."""

import pytest
from tiny_models import CHAT_TEMPLATE, make_tokenizer

from ftis_node.models import PromptTokenizer
from ftis_node.records.group import FinishReason
from ftis_node.records.token_batch import TokenBatch

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
PAD, START, END = 0, 1, 2  # <|endoftext|>, <|im_start|>, <|im_end|>
MESSAGES = [{"role": "user", "content": "12+30="}]


def _sibling(*, suffix="", extra_eos_ids=(), eos_token="<|im_end|>", special=()):
    tokenizer = make_tokenizer(chat_template=CHAT_TEMPLATE.replace("assistant\n", f"assistant\n{suffix}"))
    tokenizer.eos_token = eos_token
    if special:
        tokenizer.add_tokens(list(special), special_tokens=True)
    return PromptTokenizer(tokenizer, name="sibling", extra_eos_ids=extra_eos_ids)


def _texts(tokenizer, completions, *, opening=""):
    ids, reasons = zip(*completions, strict=True)
    return tokenizer.answer_texts(TokenBatch.from_parts(ids), reasons, opening=opening)


def test_an_id_that_the_vocabulary_leaves_out_hides_the_text():
    made = make_tokenizer()
    known = made.get_vocab()
    made.get_vocab = lambda: {text: token for text, token in known.items() if token not in (150, 151)}
    tokenizer = PromptTokenizer(made, name="with holes")
    ids = tokenizer.encode_text("42")
    assert _texts(tokenizer, [([*ids, END], STOP), ([ids[0], 150, 151, *ids[1:], END], STOP)]) == ["42", None]


def test_a_special_token_inside_an_answer_hides_its_text():
    tokenizer = _sibling()
    ids = tokenizer.encode_text("42")
    # The second ends with the end token of a sibling.
    shown = [([*ids, END], STOP), ([*ids, PAD], STOP), (ids, LENGTH)]
    hidden = [([ids[0], *[PAD] * 20, *ids[1:], END], STOP), ([*ids, END, END], STOP)]
    hidden += [([*ids, END], LENGTH), ([START, *ids], LENGTH)]
    assert _texts(tokenizer, [*shown, *hidden]) == ["42"] * 3 + [None] * 4


def test_a_tag_of_the_answer_format_is_visible_even_as_a_special_token():
    tokenizer = _sibling(special=["<think>", "</think>", "<tool>"])
    think, tool = (tokenizer._tokenizer.convert_tokens_to_ids(token) for token in ("<think>", "<tool>"))
    ids = tokenizer.encode_text("42")
    assert _texts(tokenizer, [([think, *ids, END], STOP), ([tool, *ids, END], STOP)]) == ["<think>42", None]


@pytest.mark.parametrize("suffix", ["<think>\n", "<think>\n\n</think>\n\n"])
def test_an_opening_of_the_template_is_scored_with_the_completion(suffix):
    tokenizer = _sibling(suffix=suffix)
    prompt = tokenizer.render_prompt(MESSAGES)
    assert prompt.opening == suffix
    assert tokenizer.decode(prompt.token_ids, skip_special=False) == prompt.text + suffix
    completion = [*tokenizer.encode_text("42"), END]
    assert _texts(tokenizer, [(completion, STOP)], opening=suffix) == [suffix + "42"]


def test_a_prompt_takes_the_opening_of_the_sender():
    plain, thinking = _sibling(), _sibling(suffix="<think>\n")
    assert plain.render_prompt(MESSAGES).opening == ""
    assert plain.encode_prompt(MESSAGES, opening="<think>\n") == thinking.encode_prompt(MESSAGES)
    assert thinking.encode_prompt(MESSAGES, opening="") == plain.encode_prompt(MESSAGES)
    assert thinking.encode_prompt(MESSAGES, opening="<think>\n") == thinking.encode_prompt(MESSAGES)


@pytest.mark.parametrize("content", ["what is <think>?", "</think> <think> x"])
def test_a_think_tag_in_the_problem_is_no_opening(content):
    assert _sibling().render_prompt([{"role": "user", "content": content}]).opening == ""


def test_the_preferred_end_is_the_one_that_the_template_writes_after_an_answer():
    assert _sibling().end_ids == (END,)
    assert _sibling(extra_eos_ids=[PAD]).end_ids == (END, PAD)
    assert _sibling(eos_token="<|endoftext|>", extra_eos_ids=[END]).end_ids == (END, PAD)
    base = make_tokenizer(chat_template=None)
    base.eos_token = "<|endoftext|>"
    assert PromptTokenizer(base, name="base", extra_eos_ids=[END]).end_ids == (PAD, END)


def test_siblings_with_other_templates_and_ends_have_one_fingerprint():
    siblings = [_sibling(), _sibling(suffix="<think>\n", extra_eos_ids=[PAD]), _sibling(eos_token="<|endoftext|>")]
    assert len({each.fingerprint for each in siblings}) == 1
    assert [each.hidden_ids for each in siblings] == [{PAD, START, END}] * 3
