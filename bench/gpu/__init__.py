"""The parts of the checks that need a GPU. `bench/gpu_check.py` runs them.

    cases.py       the table of parts and their cases, each with its time limit
    running.py     one case in a process of its own; its figures; a part's file
    device.py      the device's memory, time and rates, on a GPU and on the CPU
    machine.py     env, contexts
    numbers.py     attention, parity
    steps.py       memory
    transfer.py    transfer
    programs.py    learner, one_gpu, and throughput of generate: the other benches
    engine.py      generate

The parts from `env` to `transfer` need neither vLLM nor hivemind, and import neither.
"""
