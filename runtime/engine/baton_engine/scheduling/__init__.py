"""Scheduling: the sequences of the next forward pass, and their numbers of tokens."""
