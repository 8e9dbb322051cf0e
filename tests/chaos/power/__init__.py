"""Power loss: killing all processes of a node at one instant, and files that were not synced to disk."""
