"""Flags in a list of arguments, as argparse of vLLM and SGLang reads them."""

from __future__ import annotations

from collections.abc import Sequence

from baton_operator.kinds.engine import Engine

ENABLE_LORA, MAX_LORAS, MAX_LORA_RANK = "--enable-lora", "--max-loras", "--max-lora-rank"


def lora_flags(engine: Engine) -> list[str]:
    """Return the flags with which workers load adapters, the same for Baton and vLLM."""
    if engine.lora is None:
        return []
    limits = engine.lora
    return [ENABLE_LORA, f"{MAX_LORAS}={limits.max_adapters}", f"{MAX_LORA_RANK}={limits.max_rank}"]


def flag_name(argument: str) -> str:
    """
    Return the flag of an argument in its usual form; empty if it is a value.

    >>> flag_name("--kv_transfer_config.kv_role=kv_both"), flag_name("-tp=4"), flag_name("256")
    ('--kv-transfer-config', '-tp', '')
    """
    name = argument.strip().split("=")[0].split(" ")[0].split(".")[0]
    return name.replace("_", "-") if name.startswith("-") and not name[1:2].isdigit() else ""


def last_value(arguments: Sequence[str], *flags: str) -> str:
    """
    Return the value of the last of these flags, which wins; empty if they are not set.

    >>> last_value(["--block-size", "16", "--block_size=32"], "--block-size")
    '32'
    """
    value = ""
    for index, argument in enumerate(arguments):
        if flag_name(argument) not in flags:
            continue
        name, equals, text = argument.strip().partition("=")
        _, space, apart = name.partition(" ")
        if equals or space:
            value = (text if equals else apart).strip()
        elif index + 1 < len(arguments):
            value = arguments[index + 1].strip()
    return value


def data_parallel(arguments: Sequence[str]) -> bool:
    """
    Return whether several data-parallel ranks run behind one port.

    Each rank then publishes KV events at ports of its own, which routers do not follow.

    >>> data_parallel(["--data-parallel-size", "2"]), data_parallel(["--dp-size=1"]), data_parallel([])
    (True, False, False)
    """
    return last_value(arguments, "--data-parallel-size", "-dp", "--dp-size", "--dp") not in ("", "1")
