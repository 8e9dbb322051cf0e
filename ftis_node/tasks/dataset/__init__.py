"""`dataset:SOURCE?QUERY`: the rows of any data set as problems, with one reward or several by weight.

query.py         the QUERY: columns, rewards, source, digest of the problems; its regular expressions (RE2)
row_problems.py  rows read in a child process; problems from them, their digest, the held-out split
task.py          the task; rewards: format, exact, math, regex, and those of plug-ins; the digest of a run's data sets
"""
