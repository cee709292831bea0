"""Which request goes next, and to which pair of workers."""
