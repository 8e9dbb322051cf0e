"""A tiny model and its tokenizer, for episodes."""

import pytest

from ftis_node.models import load_tokenizer, resolve_model
from ftis_node.models.chat_template import PromptSettings


@pytest.fixture(scope="module")
def source(tiny_models):
    return resolve_model(str(tiny_models["s"]))


@pytest.fixture(scope="module")
def tokenizer(source):
    return load_tokenizer(source, prompts=PromptSettings())
