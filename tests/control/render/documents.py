"""Rendered objects as YAML, and the images in them."""

from typing import Any

import yaml

from phalanx_operator.render.objects import Images

IMAGES = Images("registry.example/runtime:1", "registry.example/router:1")


def as_yaml(*objects: dict[str, Any]) -> str:
    """Returns the documents of golden files, without YAML aliases."""

    class PlainDumper(yaml.SafeDumper):
        def ignore_aliases(self, data: object) -> bool:
            return True

    return "---\n".join(yaml.dump(body, Dumper=PlainDumper, sort_keys=False, width=120) for body in objects)
