"""Pure decisions about peers: what to pull and from whom, which shards to read, who is in good standing, how much.

Facts and the time come in, decisions go out: no clock, socket, task or file inside. The node's loops act on them, and
the simulation of large swarms drives the very same code in virtual time.
"""

from __future__ import annotations
