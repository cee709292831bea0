"""Models: what a checkpoint says of itself, its weights, and the one decoder that computes them all."""
