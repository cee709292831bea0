"""
Kernels in C for the processor at hand, and how they come to be.

The sources travel with the package and are compiled at first use for exactly this processor
(`library`); who runs them is `baton_engine.model.native`.
"""
