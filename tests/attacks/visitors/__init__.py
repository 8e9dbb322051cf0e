"""Hosts that visit a node: no members of its run, or peers that use up its connections."""
