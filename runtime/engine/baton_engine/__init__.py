"""The engine of one worker: model, KV cache, scheduler, sampler, KV transfer and OpenAI API."""

import os

# torch's OpenMP threads spin for 7 ms after each parallel operation, on the cores that the next pass needs.
# GNU's OpenMP reads the variable when torch is loaded; 4000 iterations take 0.1 ms. A user's value is kept.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "4000")
