"""`phalanx-runtime`: serves a model from this pod, or converts one."""

import os
import sys
from collections.abc import Sequence

from phalanx_runtime.errors import ModelError
from phalanx_runtime.settings import ConvertSettings, ServeSettings, read_settings


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0 done, 1 failed. Raises SystemExit 2 for a flag that cannot be used."""
    settings = read_settings(sys.argv[1:] if arguments is None else arguments, os.environ)
    match settings:
        case ConvertSettings():
            return _convert(settings)
        case ServeSettings():
            return _serve(settings)


def _convert(settings: ConvertSettings) -> int:
    from phalanx_runtime.checkpoint.convert import convert

    try:
        convert(settings.gguf, settings.folder)
    except ModelError as error:
        print(f"phalanx-runtime convert: {error}", file=sys.stderr)
        return 1
    print(settings.folder)
    return 0


def _serve(settings: ServeSettings) -> int:
    from phalanx_frontend.logs import start_logging
    from phalanx_runtime.server.serve import serve

    start_logging()
    return serve(settings)


if __name__ == "__main__":
    sys.exit(main())
