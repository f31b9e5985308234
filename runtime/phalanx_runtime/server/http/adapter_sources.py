"""Where a pod gets adapters: those of flags at the start, and declared ones when routers order them."""

import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from phalanx_api import wire
from phalanx_runtime.checkpoint.adapter import CONFIG_FILE
from phalanx_runtime.checkpoint.locate import locate_adapter
from phalanx_runtime.engine.adapters.on_demand import OnDemandAdapters, Spread
from phalanx_runtime.engine.adapters.relay import AdapterRefused, LocalAdapter
from phalanx_runtime.engine.client import EngineClient
from phalanx_runtime.errors import ModelError
from phalanx_runtime.server.http.adapters import read_local, read_modules
from phalanx_runtime.settings import ServeSettings

S3_KEYS, SESSION_TOKEN = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "AWS_SESSION_TOKEN"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSource:
    """Downloads declared adapters of up to a rank."""

    cache_dir: Path
    max_rank: int
    environment: Mapping[str, str]
    """With the credentials of the model's source."""
    secrets_dir: Path | None
    """Folder with a folder for each Secret that adapters may name."""
    stop: threading.Event
    """Aborts downloads."""
    cached_only: bool = False

    def fetch(self, declared: wire.DeclaredAdapter) -> LocalAdapter:
        """Returns the adapter, downloaded if necessary. Blocks. Raises AdapterRefused."""
        try:
            folder = locate_adapter(
                declared.uri,
                revision=declared.revision or None,
                cache_dir=self.cache_dir,
                environment={**self.environment, **self._credentials(declared)},
                stop=self.stop,
                cached_only=self.cached_only,
            )
            if not (folder / CONFIG_FILE).is_file():
                raise ModelError(f"{folder} has no {CONFIG_FILE}")
        except ModelError as error:
            raise AdapterRefused(str(error), is_final=False) from error
        try:
            return read_local(declared.name, folder, self.max_rank)
        except ModelError as error:
            # Clients get this reason: it names the adapter, not where the pod has it.
            raise AdapterRefused(str(error).replace(f"{folder}/", "").replace(str(folder), declared.name)) from error

    def refusal(self, declared: wire.DeclaredAdapter) -> str:
        """Downloads an adapter if necessary. Blocks. Returns why it is not usable; empty: it is."""
        try:
            self.fetch(declared)
        except AdapterRefused as error:
            return str(error)
        return ""

    def _credentials(self, declared: wire.DeclaredAdapter) -> dict[str, str]:
        if not declared.secret:
            return {}
        folder = None if self.secrets_dir is None else self.secrets_dir / declared.secret
        if folder is None or not folder.is_dir():
            raise ModelError(f"the Secret {declared.secret} is not mounted: name it in spec.engine.adapterSecrets")
        return read_credentials(folder, declared.uri.partition("://")[0], declared.secret_key)


def read_credentials(secret: Path, scheme: str, key: str) -> dict[str, str]:
    """Returns the variables that clients of a source read, from a mounted Secret. `key`: of a token. Raises ModelError."""
    match scheme:
        case "oci":
            return {"DOCKER_CONFIG": str(secret)}
        case "s3":
            optional = (secret / SESSION_TOKEN).is_file()
            return {
                **{name: _value(secret, name) for name in S3_KEYS},
                SESSION_TOKEN: _value(secret, SESSION_TOKEN) if optional else "",
            }
        case "gs":
            return {"GOOGLE_OAUTH_ACCESS_TOKEN": _value(secret, key)}
        case _:
            return {"HF_TOKEN": _value(secret, key)}


def _value(secret: Path, key: str) -> str:
    try:
        return (secret / key).read_text().strip()
    except (OSError, ValueError) as error:
        raise ModelError(f"the Secret {secret.name} has no readable key {key}") from error


def adapter_source(settings: ServeSettings, stop: threading.Event) -> AdapterSource:
    """Where this pod gets declared adapters. `stop` aborts downloads."""
    model = settings.model
    return AdapterSource(
        cache_dir=model.download_dir,
        max_rank=settings.engine.max_lora_rank,
        environment=os.environ,
        secrets_dir=model.lora_secrets_dir,
        stop=stop,
        cached_only=model.cached_only,
    )


def make_on_demand(settings: ServeSettings, client: EngineClient, spread: Spread, stop: threading.Event) -> OnDemandAdapters:
    """Loads the adapters that routers order. `spread`: see `OnDemandAdapters`. `stop` aborts downloads."""
    return OnDemandAdapters(
        client.adapters,
        settings.engine.max_loras,
        adapter_source(settings, stop).fetch,
        in_use=lambda: client.used_adapters,
        publish=client.set_adapters,
        spread=spread,
    )


def find_adapters(settings: ServeSettings) -> list[LocalAdapter]:
    """The adapters of the settings. Raises SystemExit 2 if one is not supported."""
    try:
        return read_modules(settings.model.lora_modules, settings.engine.max_lora_rank)
    except ModelError as error:
        print(f"phalanx-runtime: argument --lora-modules: {error}", file=sys.stderr)
        raise SystemExit(2) from error
