"""
Tensor parallelism: one worker computes on several ranks, each with a part of every layer.

Rank 0 is the worker's own process with scheduler, sampler and API. The other ranks are processes that repeat
rank 0's forward passes on their part of the weights and of the KV cache. Every rank has the same block table.
"""
