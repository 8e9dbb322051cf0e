"""Mathematical answers: data sets, equality of expressions, limits on what a parser reads."""
