"""
The LoRA adapters of one worker, loaded and unloaded while it serves.

A name refers to one adapter at a time. Requests hold the adapter that the name referred to when they arrived,
so a change does not affect them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from baton_api.errors import AdapterNotFound, BatonError, InvalidRequest, NotReady, SetupError
from baton_engine.model.checkpoint import Checkpoint
from baton_engine.model.decoder import Model
from baton_engine.model.families import BY_ARCHITECTURE
from baton_engine.model.lora import FILES, read_lora
from baton_engine.model.resolve import adapter_folder, served_names
from baton_engine.requests import LoadedAdapter
from baton_engine.settings import WorkerSettings
from baton_engine.spec import ModelSpec

log = logging.getLogger(__name__)

NAME_LIMIT = 256
"""Maximum characters of a name."""

PATH_SHOWN = 300
"""Maximum characters of a path in an error."""


class AdapterRegistry:
    """Adapters by name. `load` and `unload` run on the event loop; the other methods on any thread."""

    def __init__(
        self,
        read: Callable[[str, str], LoadedAdapter] | None = None,
        limit: int = 0,
        models: Sequence[str] = (),
    ) -> None:
        """`read`: loads (name, path) on any thread; None: no adapters. `limit`: maximum number of them.
        `models`: names that adapters cannot have.
        """
        self._read = read
        self._limit = limit
        self._models = frozenset(models)
        self._adapters: Mapping[str, LoadedAdapter] = {}
        self._lock = asyncio.Lock()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._adapters)

    @property
    def all(self) -> tuple[LoadedAdapter, ...]:
        return tuple(self._adapters.values())

    def get(self, name: str | None) -> LoadedAdapter | None:
        return None if name is None else self._adapters.get(name)

    def list(self, adapters: Iterable[LoadedAdapter]) -> None:
        """Replace all adapters by these, which another process has loaded."""
        self._adapters = {adapter.name: adapter for adapter in adapters}

    def of_digest(self, digest: str) -> LoadedAdapter | None:
        """Return an adapter with the same files, of any name."""
        return next((adapter for adapter in self._adapters.values() if adapter.digest == digest), None)

    async def load(self, name: str, path: str, *, in_place: bool = False) -> LoadedAdapter:
        """
        Load an adapter. With `in_place`, it may replace an adapter of this name.

        Raises InvalidRequest, AdapterNotFound if there are no files at `path`, and NotReady without memory.
        """
        if self._read is None:
            raise InvalidRequest("This worker does not load adapters. Start it with --enable-lora.")
        if not name or not path:
            raise InvalidRequest("Both 'lora_name' and 'lora_path' must be provided.")
        if reason := self._invalid(name):
            raise InvalidRequest(
                f"Invalid 'lora_name': {name[:NAME_LIMIT]!r} {reason}. Use another name.", param="lora_name"
            )
        async with self._lock:
            self._check(name, in_place)
            try:
                loaded = await asyncio.to_thread(self._read, name, path)
            except OSError as error:
                raise AdapterNotFound(
                    f"Loading lora {name} failed: No adapter found for {path[:PATH_SHOWN]}"
                ) from error
            except SetupError as error:
                raise InvalidRequest(error.message, param="lora_path") from error
            except MemoryError as error:
                raise NotReady(f"The worker has no memory for the adapter {name!r}: {error}.") from error
            self._adapters = {**self._adapters, name: loaded}
        log.info("loaded adapter %s from %s: rank=%d digest=%s", name, path, loaded.rank, loaded.digest)
        return loaded

    async def unload(self, name: str) -> None:
        """Unload an adapter. Requests that use it continue. Raises InvalidRequest and AdapterNotFound."""
        if not name:
            raise InvalidRequest("'lora_name' needs to be provided to unload a LoRA adapter.")
        async with self._lock:
            if name not in self._adapters:
                raise AdapterNotFound(f"The lora adapter '{name[:NAME_LIMIT]}' cannot be found.")
            self._adapters = {other: adapter for other, adapter in self._adapters.items() if other != name}
        log.info("unloaded adapter %s", name)

    async def load_all(self, modules: Sequence[str]) -> None:
        """Load `name=path` of each entry. Raises SetupError."""
        for module in modules:
            name, separator, path = module.partition("=")
            if not separator:
                raise SetupError(f"Invalid --lora-modules {module!r}. Expected NAME=PATH.")
            try:
                await self.load(name, path)
            except BatonError as error:
                raise SetupError(f"--lora-modules {module}: {error.message}") from error

    def _invalid(self, name: str) -> str:
        """Return why an adapter cannot have this name, or an empty string."""
        if name in self._models:
            return "is a name of the model"
        if len(name) > NAME_LIMIT:
            return f"exceeds {NAME_LIMIT} characters"
        return "" if name.isprintable() else "has characters that are not printable"

    def _check(self, name: str, in_place: bool) -> None:
        if name in self._adapters:
            if not in_place:
                raise InvalidRequest(
                    f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in "
                    "place, set 'load_inplace' to True.",
                    param="lora_name",
                )
        elif len(self._adapters) >= self._limit:
            raise InvalidRequest(
                f"{len(self._adapters)} adapters are loaded, the maximum of --max-loras. Unload one first, "
                f"or start the worker with --max-loras {self._limit + 1}."
            )


def registry_of(
    settings: WorkerSettings, spec: ModelSpec, model: Model, checkpoint: Checkpoint
) -> AdapterRegistry:
    """Return the registry of a worker. Raises SetupError."""
    if not settings.enable_lora:
        if settings.lora_modules:
            raise SetupError("--lora-modules needs --enable-lora.")
        return AdapterRegistry()
    if spec.architecture not in BY_ARCHITECTURE or spec.experts is not None or spec.latent is not None:
        raise SetupError(
            f"--enable-lora: {spec.architecture} does not support adapters, because it is an encoder or has "
            "experts or latent attention. Remove the flag."
        )

    def read(name: str, path: str) -> LoadedAdapter:
        weights = read_lora(adapter_folder(path, FILES), spec, settings.max_lora_rank)
        return LoadedAdapter(name, path, weights.digest, weights.rank, model.prepare_adapter(weights))

    names = served_names(settings.served_model_name, checkpoint, settings.model)
    return AdapterRegistry(read, settings.max_loras, names)
