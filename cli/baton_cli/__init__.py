"""The command line: `baton serve`, `up`, `chat`, and what starts each process."""
