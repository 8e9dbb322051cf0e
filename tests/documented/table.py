"""Which documented commands a test runs, and why the others are only parsed.

The first matching pattern decides. A command without a match fails the test: add it here, best to `RUN`.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

RUN = (  # by test_running.py, which replaces the words in capitals
    "ftis-node join --model models/s --task arithmetic --peers ADDRESS --home homes/s --engine torch --steps 10",
    "ftis-node join --model DIR --run examples/ftis-node-task-sorting/run.toml --steps 1",
    "ftis-node bootstrap --home homes/bootstrap",
    "ftis-node doctor --model DIR --peers ADDRESS",
    "ftis-node status*",
    "ftis-node peers*",
    "ftis-node replay list*",
    "ftis-node replay stats*",
    "ftis-node replay show*",
    "ftis-node tasks*",
    "ftis-node eval --model models/s --task arithmetic*",
    "ftis-node ensemble --models models/s,models/m --task arithmetic*",
    "ftis-node export --home homes/s --out models/s-trained",
    "openssl rand -hex 32 > swarm.secret",
    "chmod 600 swarm.secret",
)

ENDLESS = ("ftis-node status*--watch*",)
INSTALLS = (
    "fetches packages; make test-all installs the same extras, and test_commands.py checks that they are declared"
)
OTHERWISE = "the same command with other arguments is run here"
NOT_RUN = {
    "make *": "test_commands.py checks that make knows the target; .ci/run is lint, scan, site, test and test-all",
    "make": "test_commands.py checks that make knows the target",
    "pip install ./examples/*": "conftest.py installs it, without an index",
    "pip install*": INSTALLS,
    "pip uninstall*": "changes the environment of the tests; make setup-vllm runs it on a machine without a GPU",
    "ftis-node --help": "tests/cli and bench/startup.py",
    "ftis-node --install-completion": "changes the reader's shell",
    "ftis-node --version": "tests/test_architecture.py",
    "ftis-node --debug *": OTHERWISE,
    "ftis-node status*--watch*": "runs until ctrl-C; tests/cli/test_status.py watches a node",
    "python examples/python/trl_exchange.py*": "tests/integrations/test_trl_swarm.py runs it",
    "ftis-node join --role exchange*": "tests/integrations/test_trl_swarm.py runs an exchange node and its trainer",
    "ftis-node join --role *": "tests/node/test_roles.py runs a learner and its generators",
    "ftis-node join *--role *": "tests/node/test_roles.py runs a learner and its generators",
    "ftis-node join *--track *": "tests/node/training/test_tracking.py",
    "ftis-node join *--lora*": "tests/node/test_swarm.py and tests/learner train adapters; vLLM: test_vllm_node.py",
    "ftis-node join *--run run.toml --task arithmetic:*": "test_domains.py and startup/test_run_plan.py in tests/node",
    "ftis-node join*Qwen/*": "tests fetch no model of the hub",
    "ftis-node join*": OTHERWISE,
    "ftis-node bootstrap*": OTHERWISE,
    "ftis-node doctor*": OTHERWISE + "; tests/cli/test_doctor.py",
    "ftis-node *export*--push-to*": "needs the hub; tests/cli/test_push.py pushes to a fake hub",
    "ftis-node replay export*": "tests/cli/test_replay_texts.py",
    "ftis-node eval*": OTHERWISE + ", with a file of problems: tests/tasks/test_data_files.py",
    "ftis-node export*": OTHERWISE + "; tests/cli/test_export.py",
    "ftis-node tiny*": "half a minute of training; tests/lab makes tiny models",
    "ftis-node demo*": "three minutes; tests/lab runs a short demo",
    "ftis-node compare*": "minutes to hours; tests/lab runs short experiments",
    "ftis-node ensemble*": OTHERWISE + "; tests/evaluation/test_ensemble.py",
    "ftis-node swarm*": "tests/gossip/directory/test_survey.py surveys a swarm of three",
    "ftis-node docs*": "tests/cli/test_docs.py",
    "ftis-node dashboard*": "needs a terminal; tests/dashboard runs it in one",
    "ftis-node report*": "tests/report reads the page",
    "ftis-node identity*": "tests/cli/test_identity.py backs up and restores a key",
    "ftis-node": "the program's name without a command",
    "python examples/python/trl_exchange.py *": "tests/integrations/test_trl_swarm.py runs it",
    "python bench/*": "a measurement, minutes long: make bench",
    "python -m *": "a tool for developers: make docs, make fuzz, make chaos",
    "unshare *": "a measurement, minutes long",
    "tensorboard *": "another project's program, which runs until it is stopped",
    "hf *": "another project's program",
    "docker *": "needs a container engine; tests/deploy reads the files",
    "podman *": "needs a container engine; tests/deploy reads the files",
    "kubectl *": "needs a cluster; tests/deploy reads the files",
    "helm *": "needs a cluster; tests/deploy/test_helm.py renders the chart",
    "prometheus *": "another project's program; tests/node/http_api checks this configuration with promtool",
    "promtool *": "another project's program; tests/deploy reads the rules",
    "systemctl *": "needs systemd; tests/deploy reads the units",
    "sudo *": "changes the machine",
    "loginctl *": "changes the machine",
    "journalctl *": "needs systemd",
    "useradd *": "changes the machine",
    "curl *": "the status port: tests/node sends such requests",
    "git *": "fetches a repository",
    "nvidia-smi*": "needs a GPU's driver",
    "cd *": "a folder of the reader's",
    "mkdir *": "a folder of the reader's",
    "cp *": "files of the reader's",
    "scp *": "files of the reader's",
    "mv *": "files of the reader's",
    "rm *": "files of the reader's",
    "chmod *": "files of the reader's",
    "chown *": "files of the reader's",
    "openssl rand *": "the same command with another file is run here",
    "umask *": "the reader's shell",
    "(umask *": "the reader's shell",
    "echo *": "the reader's shell",
    "python3 -m venv *": "a folder of the reader's; make creates .venv in the same way",
    "/opt/*": "an installation in the system's folders; the same command with another path is in this table",
    "source *": "the reader's shell",
    "export *": "the reader's shell",
    "for *": "the reader's shell",
    "bash *": "the reader's shell",
}


def is_run(command: str) -> bool:
    """Return whether test_running.py runs the command."""
    return any(fnmatchcase(command, pattern) for pattern in RUN) and not any(
        fnmatchcase(command, pattern) for pattern in ENDLESS
    )


def reason_not_run(command: str) -> str | None:
    """Return why the command is not run; None if it is not in the table."""
    return next((reason for pattern, reason in NOT_RUN.items() if fnmatchcase(command, pattern)), None)
