"""From logits to tokens: penalties, token masks and reproducible sampling."""
