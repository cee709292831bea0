"""Python imports this first in the processes that a test with `interpreted` starts: they are as fast."""

from baton_engine.ops.kernels import quantized
from tests.engine.kernels import interpreter

interpreter.install()
quantized.ROW_OUTPUTS = interpreter.ROW_OUTPUTS
