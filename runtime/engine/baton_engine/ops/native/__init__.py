"""
Native kernels in C, and their compilation.

The package contains the sources. `library` compiles them at first use for exactly this processor, and
`baton_engine.model.native_decoder` calls them.
"""
