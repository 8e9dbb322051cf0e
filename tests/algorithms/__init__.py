"""Tests of `ftis_node.algorithms`."""
