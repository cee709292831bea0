"""Where the router finds its workers."""
