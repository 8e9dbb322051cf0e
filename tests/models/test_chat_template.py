"""Chat templates: rendered as by transformers, without a clock, and checked under limits before their first use."""

import os
import time

import pytest
from tiny_models import CHAT_TEMPLATE, make_tokenizer, save_tiny

from ftis_node.errors import ModelError
from ftis_node.models import PromptSettings, PromptTokenizer, load_tokenizer, resolve_model

SYSTEM = [{"role": "system", "content": "Answer."}, {"role": "user", "content": 'Is "½" < 1?'}]
ALONE = SYSTEM[1:]
DATED = "{{ strftime_now('%d %b %Y') }} {{ messages[-1]['content'] }}"
MACRO = "{% macro again(n) %}{% if n %}{{ again(n - 1) }}{{ again(n - 1) }}{% endif %}{% endmacro %}{{ again(30) }}"
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{{ messages[0]['content'] }}"


def _tokenizer(source, **prompts):
    return PromptTokenizer(make_tokenizer(chat_template=source), name="tiny", prompts=PromptSettings(**prompts))


def _text(tokenizer, messages=ALONE):
    return tokenizer.decode(tokenizer.encode_prompt(messages), skip_special=False)


@pytest.mark.parametrize(
    "template",
    [
        CHAT_TEMPLATE,
        "{{ bos_token }}{{ eos_token }}{{ messages | tojson }}{% if tools %}tools{% endif %}",
        "{% for m in messages %}\n    {% generation %}{{ m.content | trim }}{% endgeneration %}\n{% endfor %}",
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
        "{%- set ns = namespace(n=0) -%}{%- for m in messages -%}{%- set ns.n = ns.n + 1 -%}{%- endfor -%}{{ ns.n }}",
        "{{ missing }}{% if missing is defined %}x{% endif %}{{ messages[-1]['content'][::-1] }}",
    ],
)
def test_a_template_is_rendered_as_by_transformers(template, messages=SYSTEM):
    tokenizer = make_tokenizer(chat_template=template)
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert PromptTokenizer(tokenizer, name="tiny").encode_prompt(messages) == expected


def test_a_template_reads_a_constant_date_and_no_clock(monkeypatch):
    assert _text(_tokenizer(DATED)).startswith("01 Jan 2026 ")
    for zone in ("Pacific/Auckland", "America/Los_Angeles"):
        monkeypatch.setitem(os.environ, "TZ", zone)
        time.tzset()
        assert _text(_tokenizer("{{ strftime_now('%Y-%m-%d %H:%M') }}")) == "2026-01-01 00:00"
        assert _text(_tokenizer("{{ strftime_now('%s %%s') }}")) == "1767225600 %s"
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    "template", ["{{ ['a', 'b'] | random }}", "{{ lipsum() }}", "{{ 1 + messages }}", "{{ 1 / 0 }}"]
)
def test_a_template_that_draws_or_fails_is_a_model_error_of_one_line(template):
    with pytest.raises(ModelError, match=r"^the chat template of tiny refuses the prompt: [^\n]*$"):
        _tokenizer(template).encode_prompt(ALONE)


def test_arguments_of_the_operator_are_variables_of_the_template():
    template = "{% if enable_thinking is defined and not enable_thinking %}no {% endif %}{{ messages[0].content }}"
    silent = _tokenizer(template, arguments={"enable_thinking": False})
    assert _text(silent).startswith("no ")
    assert not _text(_tokenizer(template)).startswith("no ")
    assert silent.template_digest != _tokenizer(template).template_digest
    assert _tokenizer(template).template_digest == _tokenizer(template).template_digest


def test_the_default_of_several_templates_is_used():
    several = {"chat": "chat {{ messages[0].content }}", "tool_use": "tool"}
    assert _text(_tokenizer(several | {"default": "default"})) == "default"
    with pytest.raises(ModelError, match=r"several chat templates \(chat, tool_use\), none named 'default': copy"):
        _tokenizer(several).encode_prompt(ALONE)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (LOOP, "takes over 20,000 turns of loops"),
        ("{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}", "turns of loops"),
        (MACRO, "turns of loops"),
        ("{% if messages[2:] %}" + LOOP + "{% endif %}", "turns of loops"),  # in an episode
        ("{{ 'a'.ljust(20000000) | map('string') | join | length }}", "takes over 1 s"),
        ("{{ 'x'.ljust(99999999999) }}", "GiB of memory"),
    ],
)
def test_a_template_beyond_the_limits_is_refused_when_the_model_is_loaded(tmp_path, template, reason):
    folder = save_tiny(tmp_path / "tiny")
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(ModelError, match=f"the chat template of tiny cannot be used: rendering an example .*{reason}"):
        load_tokenizer(resolve_model(str(folder)), prompts=PromptSettings())


def test_a_template_that_loops_only_on_some_texts_refuses_them():
    tokenizer = _tokenizer("{% if 'apples' in messages[0]['content'] %}" + LOOP + "{% endif %}")
    assert tokenizer.encode_prompt(ALONE) == []
    began_at = time.monotonic()
    with pytest.raises(ModelError, match="refuses the prompt: it takes over 20,000 turns of loops"):
        tokenizer.encode_prompt([{"role": "user", "content": "12 apples"}])
    assert time.monotonic() - began_at < 10, "today's loop takes 600 s"


@pytest.mark.parametrize("value", ["n ** 2 ** n", "'x' * n ** 9", "[1] * (n * 10 ** 9)"])
def test_a_template_that_makes_a_large_value_refuses_the_text(value):
    tokenizer = _tokenizer(
        "{% set n = messages[0]['content'] | length %}{% set x = " + value + " %}{{ n * 2 }}{{ 'ab' * n }}"
    )
    with pytest.raises(ModelError, match="may make a large value"):
        tokenizer.encode_prompt([{"role": "user", "content": "x" * 60}])


def test_a_long_conversation_is_within_the_limits():
    turns = [{"role": "user", "content": "x" * 100}] * 1000
    assert len(_tokenizer(CHAT_TEMPLATE).encode_prompt(turns)) > 1000


def test_a_template_within_the_limits_is_accepted_even_if_it_refuses_the_examples(tmp_path):
    folder = save_tiny(tmp_path / "tiny")
    (folder / "chat_template.jinja").write_text("{{ 1 / 0 }}")
    assert load_tokenizer(resolve_model(str(folder)), prompts=PromptSettings()).template is not None
