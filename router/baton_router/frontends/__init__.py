"""Several processes on one port: frontends that hold connections, and one scheduler."""
