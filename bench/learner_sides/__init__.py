"""The learner and TRL's GRPOTrainer, each in a separate process that takes the same steps on command.

    job.py       what a side is asked to do: a model, a batch, a precision, a device
    batch.py     the completions of a step: ragged, in groups, all with signal
    process.py   start a side, ask it for a step, read its figures
    serving.py   the side's end of that: its own memory and the machine's matrix-product peak
    ours.py      `learner.learner.Learner`, as the learner's worker holds it
    theirs.py    `trl.GRPOTrainer`, driven through its own training loop

The last two are programs: `process.py` runs them as `python -m`, and only the last one needs TRL.
"""
