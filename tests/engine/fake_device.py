"""
A GPU that has tensors but computes nothing: torch's fake tensors, and launches of Triton that are checked.

Fake tensors have a device, a shape and strides. torch raises where an operation mixes devices. It does not
raise where the host would wait for a real device: `FakeDevice.waits` lists these calls. Tensors of the CPU
are real. The host reads zeros from the device.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

GPU = torch.device("cuda", 0)

READS = ("_local_scalar_dense", "equal")
"""Operations whose result the host reads."""

UNKNOWN_SIZES = ("nonzero", "masked_select", "_unique2", "unique_consecutive")
"""Operations whose result has a size that the host must read. The engine has none of them on a device."""

MOST_PROGRAMS = (2**31 - 1, 65_535, 65_535)
"""Of a grid, by dimension."""

STRIDED = frozenset(("x", "result", "kv", "words", "logits", "weights", "tables", "q_part", "latents"))
"""Arguments of kernels whose rows may be apart. The last dimension is contiguous. Others are contiguous."""


class Launch(NamedTuple):
    """A launch of a kernel."""

    kernel: str
    grid: tuple[int, ...]
    variant: tuple[Any, ...]
    """Triton compiles each one separately: constants, types, and which numbers are 1 or multiples of 16."""


class FakeDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Checks the calls of torch and the launches of kernels inside of `running`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.waits: list[str] = []
        """Calls that make the host wait for the device, each with the function of the engine."""
        self.launches: list[Launch] = []
        self._fakes = FakeTensorMode(allow_non_fake_inputs=True)
        self._pinned: list[Tensor] = []
        """Tensors in page-locked memory. They are kept, so that their addresses are not used again."""

    @contextlib.contextmanager
    def running(self) -> Iterator[FakeDevice]:
        """Tensors of "cuda" are fake, and kernels are checked instead of run."""
        with self._fakes, self, self._kernels():
            yield self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "aten":
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        name = func.name().removeprefix("aten::").partition(".")[0]
        if name == "is_pinned":
            return self._is_pinned(args[0])
        if name == "_pin_memory" or kwargs.pop("pin_memory", False):
            pinned = (
                _really(torch.clone, args[0]) if name == "_pin_memory" else _really(func, *args, **kwargs)
            )
            self._pinned.append(pinned.zero_() if name == "empty" else pinned)
            return pinned
        if name in ("_to_copy", "copy_"):
            return self._copied(name, func, args, kwargs)
        leaves = tree_leaves((args, kwargs))
        if GPU in leaves or any(isinstance(leaf, FakeTensor) for leaf in leaves):
            return self._computed(name, func, args, kwargs)
        return _really(func, *args, **kwargs)

    def _copied(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """Copy a tensor, perhaps from one device to the other."""
        if name == "copy_":
            source, target, free = args[1], args[0].device, len(args) > 2 and args[2]
        else:
            source, target = args[0], kwargs.get("device") or args[0].device
            free = kwargs.get("non_blocking", False)
        if source.device.type == target.type:
            return self._fake(func, args, kwargs) if target.type == "cuda" else _really(func, *args, **kwargs)
        if not (free and self._is_pinned(source if target.type == "cuda" else args[0])):
            self._wait(f"{name} from {source.device.type}")
        if target.type == "cuda":
            return self._fake(func, args, kwargs)
        dtype = kwargs.get("dtype") or source.dtype
        if name == "copy_":
            return _really(torch.zero_, args[0])
        return _really(torch.zeros, source.shape, dtype=dtype)

    def _computed(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """Call an operation of the device, and check what it reads."""
        leaves = tree_leaves((args, kwargs))
        of_host = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.device.type == "cpu"]
        # A number is a tensor of the CPU without dimensions. As an index, it is copied.
        if any(tensor.dim() or name.startswith("index") for tensor in of_host):
            self._wait(f"{name} with a tensor of the CPU")
        assert name not in UNKNOWN_SIZES, f"the host reads the size of the result of {name}"
        if name in READS:
            self._wait(name)
        match name:
            case "_local_scalar_dense":
                return 0
            case "equal":
                return True
            case _:
                return self._fake(func, args, kwargs)

    def _fake(self, func: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = tree_map_only(Tensor, self._faked, (args, kwargs))
        return func(*args, **kwargs)

    def _faked(self, tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self._fakes.from_tensor(tensor)

    def _is_pinned(self, tensor: Tensor) -> bool:
        if isinstance(tensor, FakeTensor):
            return False
        address = tensor.untyped_storage().data_ptr()
        return any(pinned.untyped_storage().data_ptr() == address for pinned in self._pinned)

    def _wait(self, call: str) -> None:
        frames = [frame for frame in traceback.extract_stack() if "/baton_engine/" in frame.filename]
        place = f"{Path(frames[-1].filename).name} {frames[-1].name}" if frames else "test"
        self.waits.append(f"{place}: {call}")

    @contextlib.contextmanager
    def _kernels(self) -> Iterator[None]:
        from baton_engine.ops.kernels import layers

        kind: Any = type(layers._rms_norm)  # of the interpreter, or of the compiler
        run = kind.run

        def launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            self.launches.append(checked_launch(kernel, args, grid, kwargs))

        kind.run = launch
        try:
            yield
        finally:
            kind.run = run


def _really(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Call an operation of the CPU."""
    with _disable_current_modes():
        return func(*args, **kwargs)


def checked_launch(
    kernel: Any, args: tuple[Any, ...], grid: tuple[int, ...], kwargs: dict[str, Any]
) -> Launch:
    """Check the arguments of a launch, and return it."""
    from triton.runtime import JITFunction

    name = kernel.fn.__name__
    assert all(0 < size <= most for size, most in zip(grid, MOST_PROGRAMS, strict=False)), (name, grid)
    compiled: Any = JITFunction(kernel.fn, do_not_specialize=kernel.kwargs["do_not_specialize"])
    values = dict(zip(compiled.arg_names, args, strict=False)) | kwargs
    variant: list[Any] = []
    checked: set[int] = set()  # an argument that is not used repeats another one
    for parameter in compiled.params:
        value = values.pop(parameter.name)
        if isinstance(value, Tensor):
            place = f"{parameter.name} of {name}"
            assert value.device.type == "cuda", f"{place} is on {value.device}"
            if parameter.name in STRIDED:
                assert value.stride(-1) == 1 or value.shape[-1] <= 1, f"{place} has strides {value.stride()}"
            elif id(value) not in checked:
                assert value.is_contiguous(), f"{place} has strides {value.stride()}"
            checked.add(id(value))
            # torch's allocator returns multiples of 512 bytes.
            variant.append((value.dtype, value.storage_offset() * value.element_size() % 16 == 0))
        elif parameter.is_constexpr:
            variant.append(value)
        elif isinstance(value, int):
            special = () if parameter.do_not_specialize else (value == 1, value % 16 == 0)
            variant.append((abs(value) < 2**31, *special))
    return Launch(name, grid, (name, *variant, *sorted(values.items())))
