"""A visit of a hivemind DHT client: `python -m tests.attacks.visitors.hivemind_client ADDRESS FOLDER`.

It prints how many records it tried to store or read.
"""

import asyncio
import os
import sys
import time

from ftis_node.gossip.p2pd.hivemind_bindings import P2P, DHTNode

NUM_RECORDS = 4
DHT_WAIT_S = 5.0


async def visit(address: str, folder: str) -> int:
    """Store and read records, as an averager of another program does to announce itself."""
    identity = os.path.join(folder, "identity")
    P2P.generate_identity(identity)
    p2p = await P2P.create(
        initial_peers=[address], identity_path=identity, host_maddrs=["/ip4/127.0.0.1/tcp/0"], use_relay=False,
        use_auto_relay=False, dht_mode="client",
    )  # fmt: skip
    node = await DHTNode.create(p2p=p2p, client_mode=True, ensure_bootstrap_success=False, wait_timeout=DHT_WAIT_S)
    try:
        expires_at = time.time() + 60
        for number in range(NUM_RECORDS):
            await node.store(f"experts.{number}", os.urandom(200), expires_at, subkey="peer")
            await node.get(f"experts.{number}")
    finally:
        await node.shutdown()
        await p2p.shutdown()
    return 2 * NUM_RECORDS


if __name__ == "__main__":
    sys.stdout.write(str(asyncio.run(visit(sys.argv[1], sys.argv[2]))))
