"""Values that several rooms share."""

MIB, GIB = 2**20, 2**30
IGNORE = -100  # the label of a token that is not trained; cross-entropy leaves it out
