"""The table of docs/train/models.md, made from the rows of `tests/learner/families.py`.

python -m tests.documented.families     write it into the page
"""

from ftis_node.config.manifest import load_manifest
from ftis_node.learner.model.policy_loading import padded_share
from tests.documented.pages import ROOT, write_table
from tests.learner.families import CPU_FAILS, DIFFERS, FAMILIES, UPDATE_FAILS, Family

PAGE = ROOT / "docs/train/models.md"
PRESET = "gsm8k-ftis"  # the run by whose limits the page gives the cost of padded rows
HEAD = """| family | class | all weights, torch engine | LoRA | rows | vLLM on a CPU | notes |
|---|---|---|---|---|---|---|
"""
VLLM = {
    "": "yes", DIFFERS: "refused: its log-probs differ from the learner's", CPU_FAILS: "refused: it fails at the start",
    UPDATE_FAILS: "no: it fails at the first new weights",
}  # fmt: skip


def families_table() -> str:
    return HEAD + "".join(map(_row, FAMILIES))


def _row(family: Family) -> str:
    share = padded_share(load_manifest(PRESET).sampling)
    columns = (
        family.name, f"`{family.prefix}ForCausalLM`", "yes", "yes" if family.lora else "refused",
        "packed" if family.packs else f"padded: {share:.1f} times the positions", VLLM[family.vllm],
        family.notes or "-",
    )  # fmt: skip
    return f"| {' | '.join(columns)} |\n"


if __name__ == "__main__":
    write_table(PAGE, HEAD, families_table())
