"""Speculation: draft tokens that a forward pass computes beside the pending one, and their verification."""
