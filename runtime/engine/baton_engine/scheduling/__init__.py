"""Which sequences take part in the next forward pass, and with how many tokens."""
