"""The bindings import hivemind without torch, and a program can still import all of hivemind."""

import subprocess
import sys

BINDINGS = "from ftis_node.gossip.p2pd.hivemind_bindings import DHTNode, P2P, PeerID\n"
WHOLE = """
import hivemind
assert hivemind.DHT is not None and hivemind.Optimizer is not None
from hivemind import dht, p2p, utils
assert p2p.PeerID is PeerID and dht.DHTNode is DHTNode and dht.DHT is hivemind.DHT
assert utils.MPFuture is not None
"""
IS_TORCH_LOADED = "import sys; print('torch' in sys.modules, 'hivemind' in sys.modules)\n"


def _run(code: str) -> str:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_p2p_and_dht_are_imported_without_torch():
    assert _run(BINDINGS + IS_TORCH_LOADED) == "False False"


def test_all_of_hivemind_can_be_imported_afterwards():
    assert _run(BINDINGS + WHOLE + IS_TORCH_LOADED) == "True True"
