"""Visitors of a node that are no members of its run, and members that serve nobody well. Each stays for one visit."""
