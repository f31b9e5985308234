"""`phalanx-runtime`: serves, asks, measures, fetches, converts or quantises a model, checks the machine, prints recordings."""

import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import NoReturn

import msgspec

from phalanx_runtime.commands import (
    BenchSettings,
    CalibrationSettings,
    CalibrationSpec,
    CompletionSettings,
    ConvertSettings,
    DoctorSettings,
    FetchSettings,
    FitSettings,
    FitSpec,
    QuantizeSettings,
    QuantizeSpec,
    RecordingSettings,
)
from phalanx_runtime.errors import ModelError
from phalanx_runtime.progress import open_line
from phalanx_runtime.settings import ChatSettings, RunSettings, ServeSettings, Settings, read_settings

log = logging.getLogger(__name__)


INTERRUPTED, UNREAD = 128 + signal.SIGINT, 128 + signal.SIGPIPE
"""Exit codes after Ctrl-C and without a reader of stdout, as of shells."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns exit code 0 or 1, or `INTERRUPTED` or `UNREAD`. Exits with 2 for an invalid flag."""
    settings = read_settings(sys.argv[1:] if arguments is None else arguments, os.environ)
    try:
        status = _execute(settings)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more at its end
        return UNREAD
    return status


def _execute(settings: Settings) -> int:
    match settings:
        case ConvertSettings():
            return _convert(settings)
        case FetchSettings():
            return _fetch(settings)
        case FitSettings():
            return _fit("fit-exit", settings, partial(_exit_spec, settings))
        case CalibrationSettings():
            return _fit("calibrate-kv", settings, partial(_calibration_spec, settings))
        case QuantizeSettings():
            return _quantize(settings)
        case DoctorSettings():
            files = [] if settings.save is None else [str(settings.save)]
            program = [sys.executable, "-m", "phalanx_runtime.doctor", "json" if settings.json else "table", *files]
            return subprocess.run(program, check=False).returncode
        case RecordingSettings():
            return _print_recordings(settings)
        case ServeSettings():
            return _serve(settings)
        case BenchSettings():
            from phalanx_runtime.terminal.bench import bench

            return bench(settings)
        case CompletionSettings(shell=shell):
            from phalanx_runtime.flags import make_parser
            from phalanx_runtime.terminal.completion import completion_script

            print(completion_script(make_parser(), shell), end="")
            return 0
        case RunSettings() | ChatSettings():
            from phalanx_runtime.terminal.chat import chat, run

            return run(settings) if isinstance(settings, RunSettings) else chat(settings)


def _convert(settings: ConvertSettings) -> int:
    from phalanx_runtime.checkpoint.gguf.convert import convert

    line = open_line(sys.stderr)
    try:
        convert(settings.gguf, settings.folder, None if line is None else line.show)
    except ModelError as error:
        print(f"phalanx-runtime convert: {error}", file=sys.stderr)
        return 1
    finally:
        if line is not None:
            line.clear()
    print(settings.folder)
    return 0


def _fetch(settings: FetchSettings) -> int:
    from phalanx_runtime.checkpoint.locate import fetch_adapter, locate, locate_exit

    line, folder, token = open_line(sys.stderr), settings.download_dir, settings.hf_token
    bar, progress = (None, partial(print, file=sys.stderr)) if line is None else (line.show, line.write_above)
    try:
        model = locate(settings.model, revision=settings.revision, cache_dir=folder, hf_token=token, progress=progress, bar=bar)
        paths = [model.dir]
        if settings.exit is not None:
            paths.append(locate_exit(settings.exit, cache_dir=folder, hf_token=token, progress=progress, bar=bar))
        environment = {**os.environ, "HF_TOKEN": token or ""}
        paths += [fetch_adapter(uri, folder, environment) for uri in settings.adapters]
    except ModelError as error:
        print(f"phalanx-runtime fetch: {error}", file=sys.stderr)
        return 1
    finally:
        if line is not None:
            line.clear()
    print(*paths, sep="\n")
    return 0


def _fit(command: str, source: FitSettings | CalibrationSettings, make_spec: Callable[[str], FitSpec | CalibrationSpec]) -> int:
    """Locates the model, then runs `phalanx_runtime.fitting`, which imports torch."""
    folder = _located(source, command)
    return 1 if folder is None else _run_program("phalanx_runtime.fitting", make_spec(folder))


def _exit_spec(settings: FitSettings, model_dir: str) -> FitSpec:
    return FitSpec(
        model_dir=model_dir,
        out=str(settings.out),
        ratio=settings.ratio,
        tokens=settings.tokens,
        seconds=settings.seconds,
        temperature=settings.temperature,
        seed=settings.seed,
        dtype=settings.dtype,
    )


def _calibration_spec(settings: CalibrationSettings, model_dir: str) -> CalibrationSpec:
    return CalibrationSpec(
        model_dir=model_dir,
        out=str(settings.out),
        text="" if settings.text is None else str(settings.text),
        tokens=settings.tokens,
        seconds=settings.seconds,
        seed=settings.seed,
        dtype=settings.dtype,
    )


def _quantize(settings: QuantizeSettings) -> int:
    """Locates the model, then runs `phalanx_runtime.quantizing`, which imports torch."""
    folder = _located(settings, "quantize")
    if folder is None:
        return 1
    spec = QuantizeSpec(
        model_dir=folder,
        out=str(settings.out),
        scheme=settings.scheme,
        head=settings.head,
        calibration=None if settings.calibration is None else str(settings.calibration),
        tokens=settings.tokens,
        dtype=settings.dtype,
    )
    return _run_program("phalanx_runtime.quantizing", spec)


def _located(settings: FitSettings | CalibrationSettings | QuantizeSettings, command: str) -> str | None:
    """Returns the model's folder, or prints why there is none."""
    from phalanx_runtime.checkpoint.locate import locate

    folder, token = settings.download_dir, settings.hf_token
    try:
        model = locate(settings.model, revision=settings.revision, cache_dir=folder, hf_token=token, progress=print)
    except ModelError as error:
        print(f"phalanx-runtime {command}: {error}", file=sys.stderr)
        return None
    return str(model.dir)


def _run_program(module: str, spec: FitSpec | CalibrationSpec | QuantizeSpec) -> int:
    """Returns the exit code of a program that reads its settings from stdin."""
    return subprocess.run([sys.executable, "-m", module], input=msgspec.json.encode(spec) + b"\n", check=False).returncode


def _print_recordings(settings: RecordingSettings) -> int:
    from phalanx_frontend.flight import print_recordings

    pod = socket.gethostname()
    try:
        for line in print_recordings(settings.folder, pod=pod, group=settings.group, seconds=settings.seconds):
            print(line)
    except OSError as error:
        print(f"phalanx-runtime recording: {error}", file=sys.stderr)
        return 1
    return 0


def _serve(settings: ServeSettings) -> int:
    """Handles SIGTERM during the imports, which take seconds."""
    signal.signal(signal.SIGTERM, _exit_now)
    from phalanx_frontend.logs import make_formatter, prevent_core_dumps, start_logging
    from phalanx_runtime.server.serve import serve

    prevent_core_dumps()
    start_logging(formatter=make_formatter(settings.log_format, sys.stderr))
    for flag, why in settings.without_effect:
        log.info("a flag of vLLM has no effect", extra={"flag": flag, "why": why})
    for given, flag in settings.abbreviated:
        log.warning("a flag is abbreviated, which the next release refuses", extra={"flag": given, "use": flag})
    return serve(settings)


def _exit_now(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(0)


if __name__ == "__main__":
    sys.exit(main())
