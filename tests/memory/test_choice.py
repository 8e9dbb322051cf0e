"""What `join` trains without `--full` and `--lora`: by card, in a home with previous training, and if no plan fits."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ftis_node.config.home import Home
from ftis_node.config.node import NodeSettings
from ftis_node.errors import MachineError, ModelError, how_to_install
from ftis_node.memory import choice as memory_choice
from ftis_node.memory import placement
from ftis_node.memory.choice import (
    ADAPTER_GAIN,
    AS_QUANTIZED,
    STATES_GAIN,
    PreviousTraining,
    TrainingChoice,
    choose,
    choose_training,
    read_previous_training,
    refuse_what_does_not_fit,
    smaller_model,
)
from ftis_node.memory.machine import USABLE_SHARE
from ftis_node.memory.placement import place_workers_on
from ftis_node.memory.plan import plan
from ftis_node.models import ModelSource, published_qwen25
from ftis_node.models.accelerators import Accelerator
from ftis_node.models.shape import Experts
from tests.documented import cards
from tests.memory.planning import GIB, RUN, machine

ROOT = Path(__file__).parents[2]
QWEN = {name.removeprefix("Qwen2.5-"): shape for name, shape in published_qwen25().items()}


@pytest.fixture(autouse=True)
def _bitsandbytes(monkeypatch):
    monkeypatch.setattr(memory_choice, "find_spec", lambda name: object())


def settings(**changes: Any) -> NodeSettings:
    return NodeSettings.model_validate({"model": "m", "engine": "vllm"} | changes)


def chosen(
    model: str, *gpus_gib: float, host_gib: float = 64, previous: PreviousTraining | None = None, **changes: Any
) -> TrainingChoice:
    return choose(settings(**changes), RUN, QWEN[model], machine(*gpus_gib, host_gib=host_gib), previous)


@pytest.mark.parametrize(
    ("model", "gib", "host_gib", "name"),
    [
        ("3B", 79.0, 64, "all weights"),
        ("1.5B", 31.0, 64, "all weights, 8-bit optimizer states"),
        ("1.5B", 14.5, 64, "all weights, optimizer states in host memory"),
        ("1.5B", 22.0, 64, "a LoRA adapter of rank 128"),  # with states in host memory a step takes 1.4 times as long
        ("1.5B", 22.0, 16, "a LoRA adapter of rank 128"),  # the host memory is too small for the states
        ("0.5B", 14.5, 64, "all weights, 8-bit optimizer states"),  # with those in float32 the workers take turns
        ("3B", 22.0, 64, "a LoRA adapter of rank 128"),
        ("3B", 21.0, 64, "a LoRA adapter of rank 128, batches of 64 completions and 4096 tokens"),
        ("1.5B", 12.0, 16, "a LoRA adapter of rank 128, batches of 64 completions and 4096 tokens"),
    ],
)
def test_the_option_with_the_shortest_step_is_chosen(model, gib, host_gib, name):
    choice = chosen(model, gib, host_gib=host_gib)
    assert choice.training.split(": ")[0] == name
    fitting = [option for option in choice.options if option.fits]
    taken = next(option for option in fitting if option.name == name)
    before = fitting[: fitting.index(taken)]
    assert all(taken.made.step_s < STATES_GAIN * option.made.step_s for option in before)
    others = [option.made.step_s for option in fitting if option not in before]
    assert taken.settings.lora or taken.made.step_s < min(others) / ADAPTER_GAIN, "no option is much faster"
    assert place_workers_on(machine(gib), QWEN[model], choice.settings, RUN).cache_bytes, "`join` places these settings"


def test_the_choice_names_the_training_and_the_reason():
    choice = chosen("3B", 22)
    full = plan(QWEN["3B"], machine(22), settings(lora=False), RUN)
    usable = 22 * USABLE_SHARE
    assert choice.training == (
        f"a LoRA adapter of rank 128: full training of 3.09 B needs {full.peak_bytes / GIB:.2f} GiB, "
        + f"{usable:.2f} GiB are usable; "
        + "activations are kept in 1 of 36 layers (in all they need "
        + f"{choice.options[3].made.keeping_bytes / GIB:.2f} GiB)"
    )
    large, full = chosen("3B", 139), plan(QWEN["3B"], machine(80), settings(lora=False), RUN)
    assert full.recompute_activations
    needed = large.training.split("needs ")[1].split(" GiB")[0]
    assert float(needed) == pytest.approx(full.needed_bytes / GIB, abs=5), "the need, without the optional memory"
    assert large.training.endswith("; activations are kept")
    assert chosen("3B", 139, learner={"recompute_activations": True}).training.endswith("recomputed, as set")


def test_of_adapters_of_equal_rank_the_one_with_the_shortest_step_is_taken():
    choice = chosen("3B", 14.5, quantize="4bit")
    steps = {option.made.step_s for option in choice.options if option.fits}
    taken = next(option for option in choice.options if option.settings is choice.settings)
    assert (taken.settings.lora_adapter.rank, taken.settings.generation.max_batch) == (128, 64)
    assert taken.made.step_s == min(steps) < choice.options[0].made.step_s and choice.options[0].fits


def test_smaller_adapters_keep_the_scale_and_are_tried_last():
    options = chosen("14B", 7.6).options
    adapters = [option.settings for option in options if option.settings.lora]
    assert [option.settings.lora for option in options] == [False] * 3 + [True] * 4
    assert [given.lora_adapter.rank for given in adapters] == [128, 128, 32, 8]
    assert {given.lora_adapter.alpha / given.lora_adapter.rank for given in adapters} == {2.0}
    assert [given.generation.max_batch for given in adapters] == [0, 64, 32, 16]
    assert [given.learner.micro_batch_tokens for given in adapters] == [None, 4096, 2048, 1024]
    peaks = [option.made.peak_bytes for option in options if option.settings.lora]
    assert peaks == sorted(peaks, reverse=True)


def test_explicit_settings_limit_the_options():
    given = {"lora_adapter": {"rank": 4, "alpha": 8}, "generation": {"max_batch": 24}}
    adapters = [option.settings for option in chosen("14B", 7.6, **given).options if option.settings.lora]
    assert {option.lora_adapter.rank for option in adapters} == {4}
    assert [option.generation.max_batch for option in adapters] == [24, 24, 24, 16]
    eight = chosen("3B", 139, learner={"optimizer_states": "8bit"})
    assert (eight.settings.lora, eight.settings.learner.optimizer_states) == (False, "8bit")
    assert len(eight.options) == 5


@pytest.mark.parametrize(("lora", "training"), [(True, "a LoRA adapter of rank 128"), (False, "all weights")])
def test_full_and_lora_are_taken_without_a_choice(lora, training):
    choice = chosen("3B", 22, lora=lora)
    assert (choice.settings, choice.settings.lora) == (settings(lora=lora), lora)
    assert choice.training.split(";")[0] == f"{training}, as asked ({'--lora' if lora else '--full'})"
    if not lora:
        with pytest.raises(MachineError, match="does not fit on the GPU"):
            place_workers_on(machine(22), QWEN["3B"], choice.settings, RUN)


def test_without_a_gpu_all_weights_are_trained_even_with_little_memory():
    choice = chosen("14B", host_gib=1)
    assert (choice.settings.lora, choice.options) == (False, ())
    assert chosen("14B", 22, host_gib=1, device="cpu").settings.lora is False


def test_8_bit_states_need_bitsandbytes(monkeypatch):
    monkeypatch.setattr(memory_choice, "find_spec", lambda name: None)
    choice = chosen("1.5B", 31)
    assert choice.options[1].missing == how_to_install("8bit")
    assert choice.training.startswith("a LoRA adapter of rank 128: a step takes about ")
    assert " s, one of all weights " in choice.training


def test_a_home_continues_its_previous_training_on_any_card():
    full = chosen("3B", 22, previous=PreviousTraining(lora=False, optimizer_states="float32"), host_gib=8)
    assert {option.settings.lora for option in full.options} == {False}
    assert full.settings.learner.optimizer_states == "offload"
    eight = chosen("0.5B", 139, previous=PreviousTraining(lora=False, optimizer_states="8bit"))
    assert (eight.settings.lora, eight.settings.learner.optimizer_states) == (False, "8bit")
    adapter = chosen("0.5B", 139, previous=PreviousTraining(lora=True, rank=32, alpha=64))
    shape = adapter.settings.lora_adapter
    assert (adapter.settings.lora, shape.rank, shape.alpha) == (True, 32, 64)
    assert {option.settings.lora_adapter.rank for option in adapter.options} == {32}
    for choice in (full, eight, adapter):
        assert choice.training.split(";")[0].endswith(", as this home began")


def test_if_nothing_fits_the_error_names_the_largest_model_that_fits():
    for model, gib, named in (("14B", 31.0, "Qwen/Qwen2.5-7B"), ("3B", 7.6, "Qwen/Qwen2.5-1.5B")):
        choice = chosen(model, gib)
        quantized = "with --quantize 4bit a LoRA adapter of rank (32|8) on a 4-bit base.* fits; "
        with pytest.raises(MachineError, match=f"m does not fit on the GPU: .*{quantized}.* is {named} ") as refused:
            refuse_what_does_not_fit(choice, RUN, QWEN[model], machine(gib))
        assert refused.value.exit_code == 3
        assert "`ftis-node doctor --model m`" in str(refused.value) and "\n" not in str(refused.value)
        smaller = choose(settings(), RUN, published_qwen25()[named.removeprefix("Qwen/")], machine(gib))
        assert any(option.fits for option in smaller.options)
    with pytest.raises(MachineError, match="no Qwen2.5 model fits: take a larger card"):
        refuse_what_does_not_fit(chosen("0.5B", 2), RUN, QWEN["0.5B"], machine(2))


@pytest.mark.parametrize("generation", [{"adapters": "merge"}, {"engine_options": {"quantization": "fp8"}}])
def test_a_4_bit_base_is_advised_only_if_no_setting_excludes_it(generation):
    choice = chosen("7B", 22.0, generation=generation)
    assert "--quantize" not in smaller_model(choice, RUN, QWEN["7B"], machine(22.0))
    asked, excluded = settings(lora=True), settings(lora=True, generation=generation)
    assert plan(QWEN["3B"], machine(14.5), asked, RUN).change == "--quantize 4bit"
    assert "--quantize" not in plan(QWEN["3B"], machine(14.5), excluded, RUN).change
    experts = replace(QWEN["3B"], experts=Experts(number=8, per_token=2, size=64))
    assert "--quantize" not in plan(experts, machine(14.5), asked, RUN).change


@pytest.mark.parametrize(("model", "gib"), [("3B", 7.6), ("14B", 31.0)])
def test_a_4_bit_base_of_an_adapter_fits_where_nothing_else_does(model, gib):
    assert not any(option.fits for option in chosen(model, gib).options)
    taken = chosen(model, gib, quantize="4bit")
    assert taken.settings.lora and " on a 4-bit base" in taken.training
    assert any(option.fits and option.settings is taken.settings for option in taken.options)
    assert f"{AS_QUANTIZED}; activations are" in taken.training
    begun = chosen(model, gib, quantize="4bit", previous=PreviousTraining(lora=True, rank=4, alpha=8))
    assert begun.settings.lora_adapter.rank == 4
    assert chosen(model, gib, quantize="4bit", previous=PreviousTraining(lora=False)).training == taken.training
    on_cpu = chosen(model, gib, quantize="4bit", device="cpu")
    assert on_cpu.settings.lora and on_cpu.training == f"a LoRA adapter of rank 128 on a 4-bit base{AS_QUANTIZED}"


def write_home(home: Home, *, trains: str | None = None, **saved: Any) -> None:
    """Write the settings of a previous start, and a checkpoint if `trains` is given."""
    home.root.mkdir(parents=True, exist_ok=True)
    home.settings.write_text(settings(**saved).model_dump_json())
    if trains is not None:
        checkpoint = home.checkpoints / "step-00000007"
        checkpoint.mkdir(parents=True)
        (checkpoint / "COMPLETE").touch()
        (checkpoint / "state.json").write_text(json.dumps({"owner": {"trains": trains}}))


def test_previous_training_is_read_from_a_checkpoint_else_from_the_settings(tmp_path):
    empty, started, trained, full = (Home(tmp_path / name) for name in ("empty", "started", "trained", "full"))
    assert read_previous_training(empty, "m") is None
    write_home(started, lora=True, lora_adapter={"rank": 32, "alpha": 64})
    adapter = PreviousTraining(lora=True, rank=32, alpha=64, optimizer_states="float32")
    assert read_previous_training(started, "m") == adapter
    assert read_previous_training(started, "another model") is None
    write_home(trained, trains="LoRA of rank 16, alpha 32, on all-linear", lora=False)
    assert read_previous_training(trained, "m") == replace(adapter, rank=16, alpha=32)
    write_home(full, trains="full", lora=False, learner={"optimizer_states": "8bit"})
    assert read_previous_training(full, "m") == PreviousTraining(lora=False, optimizer_states="8bit")
    full.settings.write_text("{")
    assert read_previous_training(full, "m") == PreviousTraining(lora=False)


def test_a_generator_and_unreadable_settings_have_no_previous_training(tmp_path):
    generator, undecided, damaged = (Home(tmp_path / name) for name in ("generator", "undecided", "damaged"))
    write_home(generator, role="generator", roles={"follow": "12D3"}, lora=False)
    write_home(undecided)
    write_home(damaged, lora=True)
    damaged.settings.write_text(damaged.settings.read_text().replace("true", '"yes"', 1))
    assert [read_previous_training(home, "m") for home in (generator, undecided, damaged)] == [None] * 3


@pytest.fixture
def card(monkeypatch):
    """Return the list of GPU sizes in GiB that `placement` sees; empty at first."""
    seen: list[float] = []
    monkeypatch.setattr(placement, "pick_device", lambda device: "cuda" if seen else "cpu")
    monkeypatch.setattr(placement, "list_accelerators", lambda: [Accelerator("card", int(gib * GIB)) for gib in seen])
    monkeypatch.setattr(placement, "free_host_bytes", lambda: 64 * GIB)
    monkeypatch.setattr(memory_choice, "read_shape", lambda source: QWEN["3B"])
    return seen


SOURCE = ModelSource("m", Path("models/m"))


def test_join_chooses_by_the_card_and_a_later_start_keeps_the_choice(tmp_path, card):
    home = Home(tmp_path / "home")
    card[:] = [22.0]
    first = choose_training(settings(engine="auto"), RUN, home, SOURCE).settings
    assert (first.lora, first.lora_adapter.rank, first.engine) == (True, 128, "auto")
    write_home(home, **first.model_dump(include={"lora", "lora_adapter", "learner", "generation"}))
    card[:] = [139.0]
    again = choose_training(settings(), RUN, home, SOURCE)
    assert again.settings.lora is True
    assert again.training == "a LoRA adapter of rank 128, as this home began; activations are kept"
    card[:] = []
    assert choose_training(settings(), RUN, home, SOURCE).settings.lora is True
    assert choose_training(settings(), RUN, Home(tmp_path / "new"), SOURCE).settings.lora is False


def test_lora_without_a_rank_keeps_the_rank_of_the_home(tmp_path, card):
    home = Home(tmp_path / "home")
    write_home(home, trains="LoRA of rank 32, alpha 64, on all", lora=True)
    assert choose_training(settings(lora=True), RUN, home, SOURCE).settings.lora_adapter.rank == 32
    explicit = settings(lora=True, lora_adapter={"rank": 16})
    assert choose_training(explicit, RUN, home, SOURCE).settings.lora_adapter.rank == 16, "the learner refuses it later"


def test_a_home_that_trains_all_weights_never_switches_to_an_adapter(tmp_path, card, monkeypatch):
    home = Home(tmp_path / "home")
    write_home(home, trains="full", lora=False)
    card[:] = [8.0]
    monkeypatch.setattr(placement, "free_host_bytes", lambda: GIB)
    choice = choose_training(settings(), RUN, home, SOURCE)
    assert choice.settings.lora is False
    with pytest.raises(MachineError, match="does not fit on the GPU"):
        place_workers_on(machine(8.0), QWEN["3B"], choice.settings, RUN)


def test_nothing_is_chosen_without_a_plan(tmp_path, card, monkeypatch):
    def unreadable(source):
        raise ModelError("a mixture of experts")

    card[:] = [22.0]
    home = Home(tmp_path / "home")
    assert choose_training(settings(lora=False), RUN, home, SOURCE).training == "all weights, as asked (--full)"
    assert choose_training(settings(role="learner"), RUN, home, SOURCE).settings.lora is False
    generator = settings(role="generator", roles={"follow": "12D3"})
    assert choose_training(generator, RUN, home, SOURCE) == TrainingChoice(generator, "")
    monkeypatch.setattr(memory_choice, "read_shape", unreadable)
    assert choose_training(settings(), RUN, home, SOURCE).settings.lora is False


def test_a_model_that_does_not_fit_is_refused_before_it_is_loaded(tmp_path, card):
    card[:] = [7.6]
    with pytest.raises(MachineError, match="the largest Qwen2.5 model that fits is Qwen/Qwen2.5-1.5B"):
        choose_training(settings(), RUN, Home(tmp_path / "home"), SOURCE)


def test_the_table_of_cards_on_the_page_is_up_to_date():
    table = cards.as_markdown()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert rows[0] == ["card", *published_qwen25()]
    assert [row[0].split(",")[0] for row in rows[2:]] == [f"{size} GB" for size in (8, 12, 16, 24, 32, 48, 80, 141)]
    by_card = {row[0].split(",")[0]: dict(zip(rows[0], row, strict=True)) for row in rows[2:]}
    assert by_card["24 GB"]["Qwen2.5-3B"].startswith("LoRA 128: ")
    assert by_card["8 GB"]["Qwen2.5-3B"].startswith("LoRA 8, 4 bits: ")
    assert by_card["12 GB"]["Qwen2.5-3B"].startswith("LoRA 32, one base: ")
    assert by_card["8 GB"]["Qwen2.5-14B"] == "-"
    page = (ROOT / "docs/operate/resources.md").read_text()
    assert f"\n\n{table}\n\n" in page, "python -m tests.documented.cards"
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert "all weights of Qwen2.5-0.5B fit on 8 GB, of 1.5B on 12 GB" in readme
    assert by_card["8 GB"]["Qwen2.5-0.5B"].startswith("full") and by_card["12 GB"]["Qwen2.5-1.5B"].startswith("full")
    assert "An adapter of 3B fits on 24 GB, with `--quantize 4bit` on 8 GB. On 12 GB it fits with one base " in readme
