"""Chains: each module passes bytes of a peer through the loops that handle them.

A chain takes the items of a case, and raises an exception if the tested code is wrong.
"""
