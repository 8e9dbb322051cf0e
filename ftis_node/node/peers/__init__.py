"""Registry and reputation of peers, answers to their requests, and the operator's actions on them."""
