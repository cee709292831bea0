"""LoRA adapters of vLLM workers: where their files are, what each pod should load, and what status says."""
