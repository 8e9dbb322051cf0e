"""From the bytes of a peer to what the loops do with them: one chain a module.

A chain takes the items of a case. It ends in silence, or in the exception that it brought about.
"""
