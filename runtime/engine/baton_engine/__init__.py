"""One worker's engine: model, KV cache, scheduler, sampler, transfer and the OpenAI API of the worker."""

import os

# torch's OpenMP threads spin for 7 ms after each parallel operation, on the cores that the next pass needs.
# GNU's OpenMP reads this when torch is loaded; 4000 turns are 0.1 ms. What a user has set stands.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "4000")
