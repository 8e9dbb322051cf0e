"""Transfer of weight versions from a learner to the generators that follow it."""
