"""Weights are loaded as they were saved, or refused; exported models are loaded again."""

import json
import math
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import give_sampling_values, make_model, save_tiny

from ftis_node.errors import ConfigError, MachineError, ModelError
from ftis_node.models import load_causal_lm, load_tokenizer, model_fingerprint, pick_device, resolve_model
from ftis_node.models.loading import check_export_folder, export_model, tied_names

PROBE = torch.tensor([[5, 80, 3, 290, 17]])


def logits_of(model):
    with torch.no_grad():
        return model(PROBE).logits


@pytest.mark.parametrize(("tied", "max_shard_size"), [(True, "5GB"), (False, "100KB")])
def test_a_loaded_model_has_the_logits_of_the_saved_one(tmp_path, tied, max_shard_size):
    source = resolve_model(str(save_tiny(tmp_path / "m", tied=tied, max_shard_size=max_shard_size, seed=3)))
    model = load_causal_lm(source)
    assert torch.equal(logits_of(model), logits_of(make_model(tied=tied, seed=3)))
    assert not model.training
    assert model.config._attn_implementation == "sdpa"
    assert model.generation_config.eos_token_id == [2, 0]


@pytest.mark.parametrize(
    ("dtype", "loaded"), [("auto", torch.bfloat16), ("float32", torch.float32), ("bfloat16", torch.bfloat16)]
)
def test_a_model_is_loaded_in_the_given_dtype(tmp_path, dtype, loaded):
    source = resolve_model(str(save_tiny(tmp_path / "m", dtype="bfloat16")))
    assert {parameter.dtype for parameter in load_causal_lm(source, dtype=dtype).parameters()} == {loaded}


def rewrite(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"), r"lack 1 tensors.*layers\.1\.mlp\.up_proj"),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.ones(32)}),
            r"do not have the shapes .* model\.norm\.weight",
        ),
    ],
    ids=["missing", "shape"],
)
def test_weights_that_do_not_fill_the_model_are_an_error_of_one_line(tmp_path, capfd, change, message):
    folder = save_tiny(tmp_path / "m")
    rewrite(folder, change)
    capfd.readouterr()
    with pytest.raises(ModelError, match=message) as caught:
        load_causal_lm(resolve_model(str(folder)))
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_code_in_the_folder_is_not_run(tmp_path):
    folder = save_tiny(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "mine.py").write_text("raise SystemExit('ran')")
    with pytest.raises(ModelError, match="cannot be loaded: it needs code from its folder, which is never run$"):
        load_causal_lm(resolve_model(str(folder)))


@pytest.mark.parametrize(
    ("value", "is_refused", "dtype"),
    [(math.nan, True, "bfloat16"), (-math.inf, True, "float32"), (3e38, False, "float32")],
)
def test_weights_that_are_not_finite_are_named(tmp_path, value, is_refused, dtype):
    """Two weights of 3e38 are finite, and their sum is not."""
    folder, name = save_tiny(tmp_path / "m", dtype=dtype), "model.layers.1.mlp.up_proj.weight"
    rewrite(folder, lambda tensors: tensors[name][3, :2].fill_(value))
    source = resolve_model(str(folder))
    with pytest.raises(ModelError, match=f"the tensor {name} has NaN or infinite") if is_refused else nullcontext():
        load_causal_lm(source)


def test_a_missing_gpu_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto") == "cpu"
    with pytest.raises(MachineError, match="no CUDA device here"):
        pick_device("cuda")


def writer(model, weights):
    own = {name: tensor.clone() for name, tensor in weights.items() if name not in tied_names(model)}
    return lambda folder: save_file(own, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("tied", [True, False])
def test_an_exported_model_is_loaded_again(tmp_path, tied):
    give_sampling_values(folder := save_tiny(tmp_path / "m", tied=tied))
    source = resolve_model(str(folder))
    model, tokenizer = load_causal_lm(source), load_tokenizer(source)
    changed = {name: tensor.detach() * 1.5 for name, tensor in model.state_dict().items()}
    export_model(model, tokenizer, tmp_path / "out", dtype=torch.float32, write=writer(model, changed))
    again = resolve_model(str(tmp_path / "out"))
    loaded = load_causal_lm(again)
    model.load_state_dict(changed)
    assert torch.equal(logits_of(loaded), logits_of(model))
    assert loaded.generation_config.eos_token_id == [2, 0]
    assert loaded.generation_config.temperature == 0.9
    assert load_tokenizer(again).fingerprint == tokenizer.fingerprint
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_an_export_does_not_replace_the_current_folder_or_a_mount_point(tmp_path, monkeypatch):
    here, mounted = tmp_path / "here", tmp_path / "mounted"
    for folder in (here, mounted):
        folder.mkdir()
    monkeypatch.chdir(here)
    (tmp_path / "link").symlink_to(here)
    for out in (Path("."), here, tmp_path / "link"):
        with pytest.raises(ConfigError, match=f"^{here} is the current folder or .*: choose another with --out$"):
            check_export_folder(out)
    assert check_export_folder(mounted) == mounted
    monkeypatch.setattr(Path, "is_mount", lambda path: path == mounted)
    with pytest.raises(ConfigError, match="a mount point"):
        check_export_folder(mounted)


def test_an_export_needs_a_folder_that_can_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=f"{tmp_path}/file is no folder that you can write to"):
        check_export_folder(tmp_path / "file" / "a" / "out")
    monkeypatch.setattr("os.access", lambda path, _: path != tmp_path)
    with pytest.raises(ConfigError, match=f"{tmp_path} is no folder that you can write to"):
        check_export_folder(tmp_path / "a" / "out")


def test_the_fingerprint_differs_between_models(tmp_path):
    def fingerprint(name, **how):
        return model_fingerprint(resolve_model(str(save_tiny(tmp_path / name, **how))))

    first = fingerprint("a", seed=1)
    assert (len(first), first) == (32, fingerprint("b", seed=1))
    assert len({first, fingerprint("c", seed=2), fingerprint("d", tied=False, seed=1)}) == 3
