"""Models: configuration, weights, and the one decoder that computes all of them."""
