"""Siblings of one tiny model: the same token ids, but other chat templates and end tokens.

Each is trained for a moment to answer after its own prompt, about half of the time rightly, so that its groups have a
signal.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from ftis_node.models import load_causal_lm, load_tokenizer, resolve_model
from ftis_node.tasks.arithmetic import ArithmeticTask
from tests.trained_models import trained_model

PAD, END = 0, 2  # <|endoftext|>, <|im_end|>
NUM_STEPS, BATCH_SIZE, LEARNING_RATE = 80, 48, 2e-3
TURNS = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}ENDED\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Sibling:
    """What a sibling differs in: text before and after the turns of its template, and its end tokens."""

    name: str
    end_ids: tuple[int, ...]
    before: str = ""
    after: str = ""

    @property
    def template(self) -> str:
        end = "<|im_end|>" if END in self.end_ids else "<|endoftext|>"
        return self.before + TURNS.replace("ENDED", end) + self.after


SIBLINGS = (
    Sibling("base", (PAD,)),
    Sibling("chat", (END, PAD), before="<|im_start|>system\nYou are Chat.<|im_end|>\n"),
    Sibling("dated", (END,), before="<|im_start|>system\n{{ strftime_now('%d %b %Y') }}<|im_end|>\n"),
    Sibling("thinking", (END,), after="{% if add_generation_prompt %}<think>\n{% endif %}"),
)


def save_sibling(sibling: Sibling, folder: Path) -> Path:
    """Write the sibling to `folder` and return it."""
    shutil.copytree(trained_model("s"), folder)
    (folder / "chat_template.jinja").write_text(sibling.template)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    settings["eos_token"] = "<|im_end|>" if END in sibling.end_ids else "<|endoftext|>"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    generation = {"eos_token_id": list(sibling.end_ids)}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    source = resolve_model(str(folder))
    model, tokenizer, task = load_causal_lm(source), load_tokenizer(source), ArithmeticTask()
    torch.set_num_threads(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    for step in range(NUM_STEPS):
        rows, lengths = [], []
        for index in range(step * BATCH_SIZE, (step + 1) * BATCH_SIZE):
            item = task[index]
            answer = str(int(item.answer) + (index % 2))
            prompt = tokenizer.encode_prompt(item.prompt)
            rows.append([*prompt, *tokenizer.encode_text(answer), sibling.end_ids[0]])
            lengths.append((len(prompt), len(rows[-1])))
        width = max(map(len, rows))
        ids = torch.tensor([row + [PAD] * (width - len(row)) for row in rows])
        labels = torch.full_like(ids, -100)
        for row, (start, end) in enumerate(lengths):
            labels[row, start:end] = ids[row, start:end]
        loss = model(input_ids=ids, labels=labels).loss
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(generation))  # `save_pretrained` writes its own
    return folder
