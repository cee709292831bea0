"""Selection of tokens from logits: penalties, token masks and reproducible sampling."""
