"""What writes pages and pictures of the documentation from the code; nothing of it is in the wheel."""
