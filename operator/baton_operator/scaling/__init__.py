"""How many workers a role needs: decided from what is measured, never lowered on what is not."""
