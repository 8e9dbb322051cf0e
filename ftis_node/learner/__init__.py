"""Training on own and foreign completions: each step takes a batch of groups and returns new weights.

The package has these files and folders:

    messages.py     requests and replies between daemon and worker; no torch
    client.py       the daemon's side; no torch
    senders.py      statistics of each sender's completions in a step; no torch
    train_report.py the report of a step; the mismatch between engine and learner
    core.py         `Learner.train(groups, step)`, which uses the folders below
    worker.py       the process that holds a `Learner`

    groups.py       groups -> arrays
    batch.py        arrays -> packed micro-batches under a token budget
    model/          the policy (full or LoRA), attention, log-probs of the completion tokens
    step/           rewards -> advantages -> loss -> exact gradients -> optimizer step
    distributed/    ranks on several GPUs and hosts, and sharded tensors
    checkpoint/     durable state, export in Hugging Face format, weights for the generator
"""
