"""Fault injection: a small real swarm, faults by a seeded schedule, and invariants that are checked after each fault.

    schedule.py ---- which fault, on which node, when -----> runner.py <---- observation/: the state of a node
    faults/ -------- how each fault is injected ------------>    |      <---- invariants/: what must hold
    swarm.py ------- three nodes and a bootstrap node ----------+----> one line per fault, evidence.py

Run it with `python -m tests.chaos --seed 1 --minutes 60`. docs/develop/testing.md describes it.
"""
