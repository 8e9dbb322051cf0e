"""Chaos: a small real swarm, faults by a seeded schedule, and what must hold after each of them.

    schedule.py ---- which fault, on whom, when ----> runner.py <---- observing/: what a node looks like from outside
    faults/ -------- how it is done ---------------->    |      <---- invariants/: what must hold
    swarm.py ------- three nodes and a meeting point ----+----> report.py: a line per fault, the count at the end

By hand: `python -m tests.chaos --seed 1 --minutes 60`; what it promises and how it is read: docs/develop/testing.md.
"""
