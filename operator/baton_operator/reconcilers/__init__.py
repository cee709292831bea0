"""Reconcilers: each brings the objects of one kind to the state that their spec asks for."""
