"""CustomResourceDefinitions of other projects, from the zips of their Go modules, with pinned checksums."""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.programs import go
from tools.cache import cache_root, finished, key_of
from tools.errors import Failed
from tools.shell import output, say


@dataclass(frozen=True, slots=True)
class Source:
    """A module with the CRDs of one project. `checksum` is that of go.sum."""

    module: str
    checksum: str
    files: tuple[str, ...]


SOURCES = (
    Source(
        "github.com/prometheus-operator/prometheus-operator@v0.85.0",
        "h1:M5xLCLEoaW2IJfnuCwFzzpL+jSVQu3KGT84Pye+fW8s=",
        (
            "example/prometheus-operator-crd/monitoring.coreos.com_servicemonitors.yaml",
            "example/prometheus-operator-crd/monitoring.coreos.com_prometheusrules.yaml",
        ),
    ),
    Source(
        "github.com/kedacore/keda/v2@v2.20.2",
        "h1:SR60v8uIcelbveS8n/1jcl8tLdBBIbHMxmdOHw8tKqA=",
        ("config/crd/bases/keda.sh_scaledobjects.yaml",),
    ),
    Source(
        "volcano.sh/volcano@v1.10.0",
        "h1:+GzQinGgeV0j58WpWpxByOXgF+YfUPW55zghM8GqjF0=",
        ("config/crd/volcano/bases/scheduling.volcano.sh_podgroups.yaml",),
    ),
    Source(
        "sigs.k8s.io/gateway-api@v1.4.0",
        "h1:ZwlNM6zOHq0h3WUX2gfByPs2yAEsy/EenYJB78jpQfQ=",
        ("config/crd/standard/gateway.networking.k8s.io_httproutes.yaml",),
    ),
)


def crds() -> Path:
    """Returns the folder with all CRDs, downloaded once."""

    def make(folder: Path) -> None:
        for source in SOURCES:
            say(f"fetching the CRDs of {source.module} ...")
            home = _download(source)
            for name in source.files:
                (folder / Path(name).name).write_bytes((home / name).read_bytes())

    return finished(cache_root() / f"crds-{key_of(*(f'{source}' for source in SOURCES))}", make)


def _download(source: Source) -> Path:
    """Returns the module's folder. Raises Failed for another checksum."""
    with tempfile.TemporaryDirectory() as empty_folder:
        env = {"GOSUMDB": "off", "GOFLAGS": "-mod=mod", "GOWORK": "off"}
        download = json.loads(output(go(), "mod", "download", "-json", source.module, cwd=Path(empty_folder), env=env))
    if download["Sum"] != source.checksum:
        raise Failed(f"{source.module} has the checksum {download['Sum']}, expected {source.checksum}")
    return Path(download["Dir"])
