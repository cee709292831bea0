"""Several processes of one worker: frontends that serve the hot paths, and the process that computes."""
