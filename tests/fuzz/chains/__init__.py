"""Chains: each module passes bytes of a peer through the loops that handle them.

`chain` takes the items of a case, and raises an exception if the tested code is wrong. `kinds` returns the message type
of an item by its tag, if it has one. `seeds` are cases that reach far.
"""
