"""One request, as values that all parts of the router share: what is asked, its cost, and who serves it."""
