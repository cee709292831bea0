"""LoRA adapters of workers: where their files are, what each pod should load, and what status says."""
