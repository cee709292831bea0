"""The path of one request: read, send to a worker, pass the answer through, retry or resume."""
