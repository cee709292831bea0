"""One worker's engine: model, KV cache, scheduler, sampler, transfer and the OpenAI API of the worker."""
