"""The engines of workers: how each is checked, driven, followed and resumed."""
