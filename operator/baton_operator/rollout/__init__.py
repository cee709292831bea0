"""How a new revision of workers takes over from the old one."""
