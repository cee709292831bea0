"""
How the weights of a safetensors checkpoint are quantized: `quantization_config` of its `config.json`.

Each method is a module that has its name, `quant_method`. To add a method, add a module with a `read`, which
returns the `Scheme` of a configuration: nothing else names methods. An option that would change the numbers
and is not supported causes an error that names it.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from baton_api.errors import SetupError
from baton_engine.model.scheme import Scheme, UnsupportedOption

WAY_OUT = "Use the bfloat16 checkpoint (with --quantize q8_0 for 8 bits), or a .gguf file."


def _find() -> dict[str, Callable[[Mapping[str, Any]], Scheme]]:
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return {name.replace("_", "-"): import_module(f"{__name__}.{name}").read for name in names}


METHODS = _find()


def scheme_of(config: Mapping[str, Any], source: str, others: Sequence[str] = ()) -> Scheme | None:
    """
    Return the quantization of a `config.json`, or None. Raises SetupError if it is not supported.

    `others` are methods that the model's family reads by itself.
    """
    given = config.get("quantization_config", config.get("compression_config"))
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise SetupError(f"{source}: quantization_config is {str(given)[:60]!r}, expected an object.")
    method = given.get("quant_method")
    if method in others:
        return None
    read = METHODS.get(method.replace("_", "-")) if isinstance(method, str) else None
    if read is None:
        raise SetupError(
            f"{source}: weights quantized by {str(method)[:60]!r} are not supported. "
            f"Supported: {', '.join(METHODS)}. {WAY_OUT}"
        )
    try:
        return read(given)
    except UnsupportedOption as error:
        raise SetupError(f"{source}: {method} weights with {error}. {WAY_OUT}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise SetupError(f"{source}: quantization_config of {method} is damaged: {error!r}.") from error
