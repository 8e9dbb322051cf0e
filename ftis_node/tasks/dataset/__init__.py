"""`dataset:SOURCE?QUERY`: the rows of any data set as problems, with one reward or several by weight.

query.py         the QUERY: columns, rewards, source, digest of the problems
rows.py          rows of a local file or of the hub, read in a child process
row_problems.py  problems from rows, their digest, the held-out split
rewards.py       format, exact, math, regex, and rewards of plug-ins
task.py          the task
pinning.py       a run's digest: the starter writes it, members compare it
"""
