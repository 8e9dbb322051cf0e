"""Fault injection: a small real swarm, faults by a seeded schedule, and invariants that are checked after each fault.

    faults/ -------- which fault, on which node, and how ---> runner.py <---- observation/: the state of a node
    swarm.py ------- three nodes and a bootstrap node ----------+       <---- invariants/: what must hold
                                                                +-----> one line per fault, records of violations

Run it with `python -m tests.chaos --seed 1 --minutes 60`. docs/develop/testing.md describes it.
"""
