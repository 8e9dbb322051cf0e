"""A model's chat template: chat messages to the text of a prompt.

The environment is the one of transformers' `apply_chat_template`, with two differences that make a prompt depend on the
run alone. `strftime_now` formats the run's date instead of the clock, and there is no `random`.

A template is code of the model's author, and its sandbox bounds neither time nor memory. So `check_template` renders
examples in a child process with limits before the template is used. The child runs this file as a script, which imports
nothing heavy.
"""

from __future__ import annotations

import json
import re
import resource
import signal
import subprocess  # nosec B404: runs this interpreter
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache, partial
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

NOW = datetime(2026, 1, 1, tzinfo=UTC)  # for every template: prompts of one problem are equal on all nodes
RENDER_LIMIT_S = 1  # CPU time for all examples
MEMORY_LIMIT_BYTES = 1 << 30
WALL_LIMIT_S = 60
MAX_TURNS = 20_000  # of loops and macros in one rendering: about 0.2 s
TOO_MANY_TURNS = 3  # exit code of the check
DEFAULT = "default"  # the name that transformers gives one of several chat templates
SECONDS = re.compile(r"(?<!%)((?:%%)*)%s")
ANSWER, OBSERVATION = "THE-ANSWER", "THE-OBSERVATION"
EPISODE_EXAMPLE = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": ANSWER},
    {"role": "user", "content": OBSERVATION},
]
EXAMPLES = (
    EPISODE_EXAMPLE,
    [{"role": "system", "content": "Answer in tags."}, {"role": "user", "content": "What is 12 + 30?"}],
    [{"role": "user", "content": "What is 12 + 30?"}],
)
CHAT_TEMPLATE_FILE = "chat_template.jinja"
PLAIN_LINES = (
    "{% for message in messages %}{{ message['role'] | capitalize }}: {{ message['content'] }}{{ '\\n\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
PLAIN_EXAMPLES: tuple[Sequence[Mapping[str, object]], ...] = (
    [{"role": "user", "content": "What is 12 + 30?"}],
    [{"role": "system", "content": "Answer\n in tags. "}, {"role": "user", "content": " naïve  42"}],
)


@dataclass(frozen=True, slots=True)
class PromptSettings:
    """How this node renders prompts: `arguments` are variables of the chat template, such as `enable_thinking`."""

    arguments: Mapping[str, Any] = field(default_factory=dict)


class ChatTemplate:
    """One chat template with its variables.

    `variables` are the tokenizer's special tokens by name, `arguments` the operator's, such as `enable_thinking`.
    """

    def __init__(self, source: str, *, variables: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
        self.source = source
        self._arguments = dict(arguments)
        self._overridden = variables.keys() & arguments.keys()
        self.variables = {**variables, **arguments}

    @property
    def source_with_defaults(self) -> str:
        """The source with the operator's arguments as defaults of its variables: an export needs no arguments."""
        heads = "".join(
            f"{{% set {name} = {value!r} %}}"
            if name in self._overridden
            else f"{{% if {name} is not defined %}}{{% set {name} = {value!r} %}}{{% endif %}}"
            for name, value in self._arguments.items()
            if name.isidentifier()
        )
        return f"{heads}\n{self.source}" if heads else self.source

    def render(self, messages: Sequence[Mapping[str, object]]) -> str:
        """Return the prompt up to the assistant's turn. Raises jinja2.TemplateError, whatever the template does."""
        template = _compiled(self.source)
        template.environment.turns_left = MAX_TURNS  # type: ignore[attr-defined]
        try:
            return template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                strftime_now=partial(_formatted, NOW),
                **self.variables,
            )
        except jinja2.TemplateError:
            raise
        except Exception as error:  # an expression of the template
            raise jinja2.TemplateError(f"{type(error).__name__}: {error}") from error

    def to_json(self) -> str:
        """Return the arguments of the constructor. Raises TypeError for a variable that is no JSON."""
        return json.dumps({"source": self.source, "variables": self.variables}, sort_keys=True)


def chosen_template(tokenizer: Any, name: str, prompts: PromptSettings) -> ChatTemplate | None:
    """Return the chat template of a transformers tokenizer, of several the default one; None for plain lines.

    Raises ModelError if there are several, and no default.
    """
    from ftis_node.errors import ModelError  # the check runs this file as a script

    source = tokenizer.chat_template
    if isinstance(source, dict):
        if DEFAULT not in source:
            raise ModelError(f"{name} has several chat templates, none named {DEFAULT!r}: give a copy with one of them")
        source = source[DEFAULT]
    if source is None:
        return None
    return ChatTemplate(source, variables=tokenizer.special_tokens_map, arguments=prompts.arguments)


def around_observation(rendered: str, ends: Sequence[str]) -> tuple[str, str, str] | None:
    """Return what a rendering of `EPISODE_EXAMPLE` has around the observation: the end, the rest before it, after it.

    The end is the first of `ends` that follows the answer, also after spaces, else empty. None if a message is left
    out.
    """
    _, has_answer, rest = rendered.rpartition(ANSWER)
    before, has_observation, after = rest.partition(OBSERVATION)
    if not has_answer or not has_observation:
        return None
    for end in filter(None, ends):
        between, found, following = before.partition(end)
        if found and not between.strip():
            return between + found, following, after
    return "", before, after


def _product_size(left: Any, right: Any) -> int:
    """Return the bits of a product of integers, or the items of a repeated text or list; 0 for anything else."""
    if isinstance(left, int) and isinstance(right, int):
        return left.bit_length() + right.bit_length()
    number, items = (left, right) if isinstance(left, int) else (right, left)
    return number * len(items) if isinstance(number, int) and isinstance(items, str | list | tuple) else 0


def _formatted(time: datetime, form: str) -> str:
    """Return `time.strftime(form)`, where `%s` does not depend on the machine's time zone."""
    return time.strftime(SECONDS.sub(lambda found: f"{found[1]}{int(time.timestamp())}", form))


class TooManyTurnsError(jinja2.TemplateError):
    """A rendering that takes over `MAX_TURNS` turns of loops and calls of macros."""


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Environment that counts turns of loops and calls of macros, because some texts may make a template loop."""

    turns_left = 0
    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Return the product. Raises TooManyTurnsError for a power, and for a product of very many items or bits."""
        if operator == "**" or _product_size(left, right) > MAX_TURNS:
            raise TooManyTurnsError(f"{operator} may make a large value")
        return super().call_binop(context, operator, left, right)

    def take_turn(self) -> str:
        self.turns_left -= 1
        if self.turns_left < 0:
            raise TooManyTurnsError(f"it takes over {MAX_TURNS:,} turns of loops")
        return ""

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        tree = super()._parse(source, name, filename)
        for node in tree.find_all((jinja2.nodes.For, jinja2.nodes.Macro, jinja2.nodes.CallBlock)):
            counted = jinja2.nodes.Call(jinja2.nodes.EnvironmentAttribute("take_turn"), [], [], None, None)
            counted.set_lineno(node.lineno)
            if isinstance(node, jinja2.nodes.For) and node.test is not None:  # it runs for items without a turn, too
                node.test = jinja2.nodes.Or(counted, node.test, lineno=node.lineno)
            else:
                node.body.insert(0, jinja2.nodes.Output([counted], lineno=node.lineno))  # type: ignore[attr-defined]
            node.set_environment(self)
        return tree


@lru_cache(maxsize=4)
def _compiled(source: str) -> jinja2.Template:
    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = _BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    del environment.filters["random"]
    del environment.globals["lipsum"]
    return environment.from_string(source)


class _GenerationBlock(jinja2.ext.Extension):
    """The tag `{% generation %}` of transformers. Its contents are rendered as they are."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def plain_template(tokenizer: Any, encode: Callable[[Sequence[Mapping[str, object]]], Sequence[int]]) -> str:
    """Return the template of plain lines with which a transformers tokenizer gives the ids of `encode`; "" if none.

    The start tokens are part of it. Some tokenizers begin a text with a space, but not after a start token.
    """
    ids = encode(PLAIN_EXAMPLES[0])
    num_special = next(number for number, token in enumerate(ids) if token not in tokenizer.all_special_ids)
    start = "".join(tokenizer.convert_ids_to_tokens(ids[:num_special]))
    for before in (start, f"{start} "):
        template = f"{{{{ {json.dumps(before)} }}}}{PLAIN_LINES}" if before else PLAIN_LINES
        options = {"chat_template": template, "add_generation_prompt": True, "return_dict": False}
        if all(tokenizer.apply_chat_template(each, **options) == list(encode(each)) for each in PLAIN_EXAMPLES):
            return template
    return ""


def check_template(template: ChatTemplate) -> str | None:
    """Return why the template must not be used: it exceeds the limits of time or memory. None if it does not.

    An exception of the template is no reason, because it may refuse an example. It takes about 0.2 s.
    """
    command = [sys.executable, "-I", __file__]
    try:
        done = subprocess.run(  # nosec B603: the command is fixed
            command, input=template.to_json(), text=True, capture_output=True, timeout=WALL_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return f"rendering an example took over {WALL_LIMIT_S} s"
    if done.returncode == -signal.SIGPROF:
        return f"rendering an example takes over {RENDER_LIMIT_S} s"
    if done.returncode == TOO_MANY_TURNS:
        return f"rendering an example takes over {MAX_TURNS:,} turns of loops"
    if done.returncode:
        return f"rendering an example takes over {MEMORY_LIMIT_BYTES >> 30} GiB of memory, or ends the process"
    return None


def _render_examples() -> None:
    """Render the examples with the template on standard input, under the limits."""
    given = json.load(sys.stdin)
    template = ChatTemplate(given["source"], variables=given["variables"], arguments={})
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, RENDER_LIMIT_S)
    for messages in EXAMPLES:
        try:
            template.render(messages)
        except TooManyTurnsError:
            sys.exit(TOO_MANY_TURNS)
        except jinja2.TemplateError as error:
            if isinstance(error.__cause__, MemoryError):
                raise


if __name__ == "__main__":
    _render_examples()
