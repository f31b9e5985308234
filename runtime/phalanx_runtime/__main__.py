"""`phalanx-runtime`: serves a model from this pod, fetches or converts one, or fits an exit to one."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from types import FrameType
from typing import NoReturn

import msgspec

from phalanx_runtime.commands import ConvertSettings, FetchSettings, FitSettings, FitSpec
from phalanx_runtime.errors import ModelError
from phalanx_runtime.settings import ServeSettings, read_settings


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0 done, 1 failed. Raises SystemExit 2 for a flag that cannot be used."""
    settings = read_settings(sys.argv[1:] if arguments is None else arguments, os.environ)
    match settings:
        case ConvertSettings():
            return _convert(settings)
        case FetchSettings():
            return _fetch(settings)
        case FitSettings():
            return _fit_exit(settings)
        case ServeSettings():
            return _serve(settings)


def _convert(settings: ConvertSettings) -> int:
    from phalanx_runtime.checkpoint.gguf.convert import convert

    try:
        convert(settings.gguf, settings.folder)
    except ModelError as error:
        print(f"phalanx-runtime convert: {error}", file=sys.stderr)
        return 1
    print(settings.folder)
    return 0


def _fetch(settings: FetchSettings) -> int:
    from phalanx_runtime.checkpoint.locate import locate, locate_exit

    told, folder, token = partial(print, file=sys.stderr), settings.download_dir, settings.hf_token
    try:
        found = locate(settings.model, revision=settings.revision, cache_dir=folder, hf_token=token, progress=told)
        drafts_by = [] if settings.exit is None else [locate_exit(settings.exit, cache_dir=folder, hf_token=token, progress=told)]
    except ModelError as error:
        print(f"phalanx-runtime fetch: {error}", file=sys.stderr)
        return 1
    print(found.dir, *drafts_by, sep="\n")
    return 0


def _fit_exit(settings: FitSettings) -> int:
    """Finds the model here; what computes is a program of its own, as a rank is."""
    from phalanx_runtime.checkpoint.locate import locate

    try:
        found = locate(
            settings.model,
            revision=settings.revision,
            cache_dir=settings.download_dir,
            hf_token=settings.hf_token,
            progress=print,
        )
    except ModelError as error:
        print(f"phalanx-runtime fit-exit: {error}", file=sys.stderr)
        return 1
    spec = FitSpec(
        model_dir=str(found.dir),
        out=str(settings.out),
        ratio=settings.ratio,
        tokens=settings.tokens,
        seconds=settings.seconds,
        temperature=settings.temperature,
        seed=settings.seed,
        dtype=settings.dtype,
    )
    program = [sys.executable, "-m", "phalanx_runtime.fitting"]
    return subprocess.run(program, input=msgspec.json.encode(spec) + b"\n", check=False).returncode


def _serve(settings: ServeSettings) -> int:
    """Importing the server takes seconds: who is told to end meanwhile ends with status 0."""
    signal.signal(signal.SIGTERM, _end_at_once)
    from phalanx_frontend.logs import start_logging
    from phalanx_runtime.server.serve import serve

    start_logging()
    return serve(settings)


def _end_at_once(number: int, frame: FrameType | None) -> NoReturn:
    """Nothing serves yet, so there is nothing to end."""
    sys.exit(0)


if __name__ == "__main__":
    sys.exit(main())
