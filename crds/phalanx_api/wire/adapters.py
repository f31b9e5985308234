"""Frames between the HTTP process and rank 0 that load and unload adapters."""

import msgspec

from phalanx_api.wire.router import Adapter


class LoadAdapter(msgspec.Struct, frozen=True, array_like=True, tag="load_adapter"):
    """Load an adapter into a free slot of all ranks; the response is `AdapterLoaded`. Requests that follow may name it."""

    adapter: Adapter
    path: str  # of its folder, equal in all pods of the group


class UnloadAdapter(msgspec.Struct, frozen=True, array_like=True, tag="unload_adapter"):
    """Accept no more requests with this adapter; its slot is free once those that run have ended."""

    adapter: Adapter


class AdapterLoaded(msgspec.Struct, frozen=True, array_like=True, tag="adapter_loaded"):
    """The response to `LoadAdapter`."""

    adapter: Adapter
    why: str = ""  # it is not loaded; empty: it is
