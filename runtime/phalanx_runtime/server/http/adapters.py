"""Adapters in folders of this pod, and the routes of vLLM that load and unload them."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Depends
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import PlainTextResponse

from phalanx_api import wire
from phalanx_frontend.auth.audit import audited
from phalanx_frontend.auth.caller import Caller, current_caller
from phalanx_frontend.errors import ApiError, invalid
from phalanx_runtime.checkpoint.adapter import adapter_hash, read_adapter_config
from phalanx_runtime.engine.adapters.relay import AdapterRefused, LocalAdapter
from phalanx_runtime.engine.client import EngineClient
from phalanx_runtime.errors import ModelError

CurrentCaller = Annotated[Caller, Depends(current_caller)]
Name = Annotated[str, Field(min_length=1, max_length=256)]


class UnloadRequest(BaseModel):
    """Body of /v1/unload_lora_adapter."""

    model_config = ConfigDict(strict=True, extra="forbid")

    lora_name: Name
    lora_int_id: int | None = None
    """Of older clients; without effect."""


class LoadRequest(UnloadRequest):
    """Body of /v1/load_lora_adapter."""

    lora_path: Name


@dataclass(frozen=True, slots=True)
class AdapterFolders:
    """What requests may load: adapters of up to a rank, in folders within one."""

    within: Path
    max_rank: int

    def read(self, name: str, path: str) -> LocalAdapter:
        """Returns the adapter at a path, which may be relative to the folder. Raises ModelError outside, and as `read_local`."""
        try:
            outer = self.within.resolve()
            folder = (outer / path).resolve()
        except (OSError, RuntimeError, ValueError) as error:  # too long, a loop of links, a null character
            raise ModelError(f"{path!r:.80} is no path: {getattr(error, 'strerror', None) or error}") from error
        if not folder.is_relative_to(outer):
            raise ModelError(f"{path!r:.80} is outside of --lora-dir")
        return read_local(name, folder, self.max_rank)


def read_local(name: str, folder: Path, max_rank: int) -> LocalAdapter:
    """Returns the adapter in a folder of this pod. Reads its files whole. Raises ModelError if it is not supported."""
    try:
        read_adapter_config(folder, max_rank)
    except OSError as error:
        raise ModelError(f"cannot read {folder!s:.80}: {error.strerror or error}") from error
    return LocalAdapter(wire.Adapter(name, adapter_hash(folder)), str(folder))


def read_modules(modules: Sequence[tuple[str, str]], max_rank: int) -> list[LocalAdapter]:
    """Returns the adapters of `--lora-modules`. Raises ModelError."""
    return [read_local(name, _expanded(path), max_rank) for name, path in modules]


def _expanded(path: str) -> Path:
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError as error:  # ~ of an unknown user
        raise ModelError(f"{path}: {error}") from error


def adapter_routes(client: EngineClient, folders: AdapterFolders) -> APIRouter:
    """Builds the routes."""
    routes = APIRouter(tags=["adapters"])

    @routes.post("/v1/load_lora_adapter", response_class=PlainTextResponse)
    async def load_lora_adapter(body: LoadRequest, caller: CurrentCaller) -> str:
        """Loads an adapter from a folder that all pods of the group have."""
        with audited("load_adapter", _name(caller), caller.request_id) as entry:
            entry.subject = f"adapters/{body.lora_name}"
            _check_key(caller)
            if body.lora_name in client.assets().served_names:
                raise invalid("lora_name", f"the base model has the name {body.lora_name}", "adapter_refused")
            try:
                local = await asyncio.to_thread(folders.read, body.lora_name, body.lora_path)
                await client.adapters.load(local)
            except (ModelError, AdapterRefused) as error:
                raise invalid("lora_path", str(error), "adapter_refused") from error
            entry.detail["content_hash"] = local.adapter.content_hash
        return f"Success: LoRA adapter '{body.lora_name}' added successfully."

    @routes.post("/v1/unload_lora_adapter", response_class=PlainTextResponse)
    async def unload_lora_adapter(body: UnloadRequest, caller: CurrentCaller) -> str:
        """Takes no more requests for an adapter; those that run end with it."""
        with audited("unload_adapter", _name(caller), caller.request_id) as entry:
            entry.subject = f"adapters/{body.lora_name}"
            _check_key(caller)
            if not client.adapters.unload(body.lora_name):
                message = f"The model `{body.lora_name}` does not exist or you do not have access to it."
                raise ApiError(404, message, "lora_name", "model_not_found")
        return f"Success: LoRA adapter '{body.lora_name}' removed successfully."

    return routes


def _name(caller: Caller) -> str:
    return caller.key.name if caller.key is not None else ""


def _check_key(caller: Caller) -> None:
    """Raises ApiError 403 for a key that may not change what others use."""
    if caller.has_keys and (caller.key is None or not caller.key.may_write_console):
        message = 'this API key may not change adapters: give a key "console": "write" in the keys file'
        raise ApiError(403, message, code="adapters_read_only")
