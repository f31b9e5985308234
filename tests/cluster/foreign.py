"""CustomResourceDefinitions of other projects, from their Go modules: a module's zip carries the repository's YAML.

Only `go mod download` is asked for them, and each module is compared with its checksum here.
"""

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
    """Where the CRDs of one project lie: module and version, its checksum as in a go.sum, the files."""

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
    """The folder of all of them, filled once."""

    def make(folder: Path) -> None:
        for source in SOURCES:
            say(f"fetching the CRDs of {source.module} ...")
            home = _download(source)
            for name in source.files:
                (folder / Path(name).name).write_bytes((home / name).read_bytes())

    return finished(cache_root() / f"crds-{key_of(*(f'{source}' for source in SOURCES))}", make)


def _download(source: Source) -> Path:
    """The folder of the module. Raises Failed when it is not the one that is pinned here."""
    with tempfile.TemporaryDirectory() as nowhere:
        env = {"GOSUMDB": "off", "GOFLAGS": "-mod=mod", "GOWORK": "off"}
        told = json.loads(output(go(), "mod", "download", "-json", source.module, cwd=Path(nowhere), env=env))
    if told["Sum"] != source.checksum:
        raise Failed(f"{source.module} has the checksum {told['Sum']}, expected {source.checksum}")
    return Path(told["Dir"])
