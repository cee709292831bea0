"""Decides the next request to send, and its pair of workers."""
