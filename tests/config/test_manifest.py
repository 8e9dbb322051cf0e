"""The run configuration: presets load, the run id is its hash, and an error is one line that names the key."""

from pathlib import Path

import pytest

from ftis_node.config.manifest import (
    PRESETS,
    RunManifest,
    load_manifest,
    parse_canonical,
    parse_manifest,
    preset_for_task,
)
from ftis_node.errors import ConfigError
from tests.documented.configuration import render_reference

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_equal_after_a_round_trip_through_toml(preset, tmp_path):
    manifest = load_manifest(preset)
    file = tmp_path / "run.toml"
    file.write_text(manifest.to_toml())
    again = load_manifest(str(file))
    assert (again, again.run_id) == (manifest, manifest.run_id)


def test_the_run_id_depends_on_every_value():
    base = RunManifest(name="a", task="gsm8k")
    assert base.run_id == RunManifest(name="a", task="gsm8k").run_id
    changed = [
        RunManifest(name="b", task="gsm8k"), RunManifest(name="a", task="math500"),
        RunManifest(name="a", task="gsm8k", method={"cap": 3.0}),
        RunManifest(name="a", task="gsm8k", step={"foreign_groups": 4}),
        RunManifest(name="a", task="gsm8k", step={"backfill_with_own": True}),
        RunManifest(name="a", task="gsm8k", method={"floor": 0.0}),
        RunManifest(name="a", task="gsm8k", sampling={"mask_truncated": True}),
        RunManifest(name="a", task="gsm8k", method={"filter": "ess"}),
        RunManifest(name="a", task="gsm8k", method={"filter": "quantile"}),
        RunManifest(name="a", task="gsm8k", method={"filter": "quantile", "keep_share": 0.5}),
        RunManifest(name="a", task="gsm8k", method={"advantage_shift": 0.1}),
        RunManifest(name="a", task="gsm8k", optimizer={"kl_coef": 0.1}),
        RunManifest(name="a", task="gsm8k", optimizer={"kl_coef": 0.1, "kl_weighted": True}),
    ]  # fmt: skip
    assert len({manifest.run_id for manifest in [base, *changed]}) == 14


def test_an_explicit_default_does_not_change_the_run_id():
    given_step = {"backfill_with_own": False, "generated_groups": None}
    step = RunManifest(name="a", task="gsm8k", step=given_step, sampling={"mask_truncated": False})
    assert step.run_id == RunManifest(name="a", task="gsm8k").run_id
    given = {"floor": 0.0, "filter": "quantile", "keep_share": 0.0}
    manifest = RunManifest(name="a", task="gsm8k", method=given)
    assert manifest.method.given() == given
    assert parse_manifest(manifest.to_toml(), source="run.toml") == manifest


def test_the_run_ids_of_the_presets_do_not_change():
    """With another run id, new nodes would not find the nodes that already run a preset."""
    assert {preset: load_manifest(preset).run_id for preset in PRESETS} == {
        "arithmetic-ftis": "6097b9ef06b4ae085d73d006d3099580",
        "arithmetic-compare": "5a3b81f478d0f7e38e2cf614e34fef9c",
        "arithmetic-hdee": "1111b0edff26d8d34aed299ced87c2a3",
        "sums-ftis": "b92f874c5667b70c4d426936e808fd5e",
        "words-ftis": "e8daa525127f334ace2f7692d7a895e8",
        "guess-ftis": "c76f54537662768d1bcb80b5b32518d3",
        "calculator-ftis": "64c112ec37be81f8b397daf5c3447ba1",
        "gsm8k-ftis": "3e26efe36ceacfbd9c9e86d121728f3b",
        "open-swarm": "e9fa9e1bb89395e7774786cf783fb9b1",
        "rg-swarm": "a0100cb8ef913fbba1e3e99621da72a7",
    }


def test_the_run_id_is_the_documented_hash():
    """Another implementation computes the same hash, so it may change only with `schema_version`."""
    import hashlib
    import json

    manifest = load_manifest("gsm8k-ftis")
    given = manifest.model_dump(mode="json", exclude_none=True)
    text = json.dumps(given, sort_keys=True, separators=(",", ":"))
    assert manifest.run_id == hashlib.sha256(text.encode()).hexdigest()[:32]


CUT = 'name = "a"\ntask = "x"\n[sampling]\n'
STEP = 'name = "a"\ntask = "x"\n[step]\n'
TOO_LARGE = "[sampling]\ngroup_size = 256\nmax_completion_tokens = 100000\nmax_total_tokens = 200000"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('name = "a"\ntask = "x"\ngroupsize = 3', "unknown key 'groupsize'"),
        ('name = "a"\ntask = "x"\n[step]\nown_grups = 3', "unknown key 'step.own_grups': did you mean 'own_groups'?"),
        ('name = "a"\ntask = "x"\n[method]\nname = "ftsi"', "(got 'ftsi'): did you mean 'ftis'?"),
        ('name = "a"\ntask = "x"\n[sampling]\ngroup_size = 1', "sampling.group_size"),
        ('name = "a"\ntask = "x"\n[method]\nname = "ppo"', "method.name"),
        ('name = "a"\ntask = "x"\n[step]\nown_groups = 0\nforeign_groups = 0', "a step would take nothing"),
        (STEP + 'backfill_with_own = true\nprompt_sharing = "horizontal"', "backfill_with_own has no effect"),
        ('name = "a"\ntask = "x"\n[sampling]\nmax_prompt_tokens = 760', "no completion fits"),
        ('name = "a"\ntask = "x"\n' + TOO_LARGE, "max_envelope_bytes"),
        ('name = "a"\ntask = "x"\n[method]\nkl_threshold = 5.0', "go together"),
        ('name = "a"\ntask = "x"\n[method]\nfloor = 0.5\ncap = 0.4', "floor must not exceed cap, but 0.5 > 0.4"),
        ('name = "a"\ntask = "x"\n[method]\nfloor = 1.5', "method.floor"),
        ('name = "a"\ntask = "x"\n[method]\nfilter = "far"', "method.filter"),
        ('name = "a"\ntask = "x"\n[method]\nkeep_share = 0.5', "has no effect without filter"),
        ('name = "a"\ntask = "x"\n[method]\nrank_own = true', "has no effect without filter"),
        ('name = "a"\ntask = "x"\n[method]\nkeep_share = 0.5\nfilter = "ess"', "has no effect without filter"),
        ('name = "a"\ntask = "x"\n[optimizer]\nkl_weighted = true', "has no effect without kl_coef"),
        ('name = "a"\ntask = "x"\n[optimizer]\nlearning_rate = 2.0', "optimizer.learning_rate: "),
        (CUT + "top_p = 0.9\ntemperature = 0.7", "temperature = 1"),
        (CUT + "top_k = 20\ntemperature = 0.7", "temperature = 1"),
        ('name = "a"\ntask = "x"\n[optimizer]\nschedule = "cosine"', "needs decay_steps"),
        ('name = "a"\ntask = "x"\n[optimizer]\ndecay_steps = 9', "has no effect on a constant rate"),
        (CUT + "temperature = 0.005", "sampling.temperature"),
        ('name = "A b"\ntask = "x"', "name"),
        ("name = ", "not TOML"),
    ],
)  # fmt: skip
def test_an_invalid_manifest_is_refused_in_one_line(text, complaint):
    with pytest.raises(ConfigError) as caught:
        parse_manifest(text, source="my.toml")
    assert "my.toml" in str(caught.value) and complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_is_cut_reports_a_truncated_sampling_distribution():
    for setting in ("top_p = 0.9", "top_k = 20"):
        assert parse_manifest(CUT + setting, source="my.toml").sampling.is_truncated_sampling
    assert not parse_manifest(CUT + "temperature = 0.7", source="my.toml").sampling.is_truncated_sampling, (
        "nothing to correct"
    )
    assert not RunManifest(name="a", task="x").sampling.is_truncated_sampling


def test_the_error_of_an_unknown_run_lists_the_presets():
    with pytest.raises(ConfigError, match="arithmetic-ftis"):
        load_manifest("no-such-run")


def test_a_completion_is_limited_by_the_total_minus_the_prompt():
    sampling = load_manifest("gsm8k-ftis").sampling
    assert sampling.completion_limit(160) == 600


@pytest.mark.parametrize(
    ("task", "preset"),
    [
        ("arithmetic", "arithmetic-ftis"), ("rg:chain_sum", "rg-swarm"), ("gsm8k", "gsm8k-ftis"),
        ("math500", "gsm8k-ftis"),
    ],
)  # fmt: skip
def test_each_task_has_a_preset(task, preset):
    assert preset_for_task(task) == preset


def test_the_reference_page_is_up_to_date():
    assert (ROOT / "docs/reference/configuration.md").read_text() == render_reference(), "run `make docs`"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (RunManifest(name="x", task="arithmetic").canonical().replace(b"1e-06", b"1e999"), "optimizer.learning_rate"),
        (b"[" * 60_000, "run x"),
    ],
)
def test_a_peers_manifest_with_an_overflow_or_deep_nesting_is_refused(text, what):
    with pytest.raises(ConfigError, match=what):
        parse_canonical(text, source="run x")
