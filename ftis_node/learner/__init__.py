"""Training on one's own and others' completions: one batch of groups in, one optimiser step, new weights out.

    messages.py     what daemon and worker say to each other; light
    client.py       the daemon's side; light
    batch.py        groups -> one batch of arrays -> micro-batches under a token budget
    logprobs.py     log-probs of the completion tokens, never holding all logits
    objective.py    rewards -> advantages -> loss, by the method's name
    step.py         exact gradients in two passes over micro-batches; clip, refuse or apply
    finite.py       whether an update leaves all weights finite, known before it is made
    policy.py       the model being trained: in full, or a LoRA adapter on a frozen model
    layout_choice.py  whether it is computed in packed rows, measured when it is loaded
    checkpoint.py   all of it on disk, whole or not there
    export.py       the trained model in the hub's format
    publish.py      versions of the weights for the generator, with their proof
    mismatch.py     what engine and learner disagree by; a pure function
    check.py        an own group of the present version on which that is measured
    senders.py      what each sender's completions were worth in a step; light
    report.py       a step's figures
    core.py         joins the above: `Learner.train(groups, step)`
    worker.py       the process that holds a `Learner`

`messages`, `client` and `senders` import no torch; everything else belongs to the worker.
"""
