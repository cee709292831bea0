"""
Kernels of accelerators in Triton, each with the function that launches it.

The same source runs on CUDA and ROCm, and on a CPU in Triton's interpreter (`TRITON_INTERPRET=1`). A program
computes a token, or a tile of tokens of one sequence. Tiles and splits depend on the model and on positions
in the sequence, never on the batch. So the results of a token do not depend on the tokens beside it.
"""
