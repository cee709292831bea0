"""From logits to tokens: penalties, masks, and reproducible draws."""
