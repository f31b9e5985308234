"""Frames that load and unload adapters: between the HTTP process and rank 0, and from routers to leaders."""

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
    is_full: bool = False  # because no slot is free
    is_final: bool = True  # the adapter does not fit; otherwise a later load may succeed


class DeclaredAdapter(msgspec.Struct, frozen=True, array_like=True):
    """An adapter of the service: groups load it when a request needs it."""

    name: str
    uri: str  # file, hf, s3, gs or oci
    revision: str = ""  # of hf
    secret: str = ""  # name of the Secret with the credentials of the download; empty: those of the model
    secret_key: str = "token"


class DeclareAdapters(msgspec.Struct, frozen=True, array_like=True, tag="declare_adapters"):
    """All adapters of the service. A group unloads those that are no longer declared, or with other fields."""

    number: int  # of the policy that has the list; lists of lower numbers than the last one are ignored
    adapters: list[DeclaredAdapter]


class AdaptersChanged(msgspec.Struct, frozen=True, array_like=True, tag="adapters_changed"):
    """The assets with `former_hash`, which the leader has named to the router, have other adapters; all else is as before."""

    content_hash: str
    former_hash: str
    adapters: list[Adapter]


class RequireAdapter(msgspec.Struct, frozen=True, array_like=True, tag="require_adapter"):
    """Load a declared adapter, unless it is loaded. `State.adapters` and `Assets.adapters` report the result."""

    name: str
    content_hash: str = ""  # what another group has: a group that has other content reads the files again; empty: any is right
