"""Types of flags, and the flags of all commands but `serve`, `run` and `chat`.

A type parses a text or raises `ArgumentTypeError`.
"""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from phalanx_api.engine_config import SETTINGS


def flag_type(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Returns `parse` with ValueError converted to ArgumentTypeError."""

    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parsed


def natural(text: str) -> int:
    """Parses a whole number of at least 0. Raises ArgumentTypeError."""
    value = int(text) if text.isdecimal() else -1
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return value


def positive(text: str) -> int:
    """Parses a whole number of at least 1. Raises ArgumentTypeError."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def port(text: str) -> int:
    """Parses a port; 0: any free port. Raises ArgumentTypeError."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port")
    return int(text)


def seconds(text: str) -> float:
    """Parses a duration of at least 0. Raises ArgumentTypeError."""
    return _number(text, lambda value: 0 <= value < float("inf"), "a time in seconds")


def share(text: str) -> float:
    """Parses a fraction in (0, 1]. Raises ArgumentTypeError."""
    return _number(text, lambda value: 0 < value <= 1, "a share above 0 and at most 1")


def above_zero(text: str) -> float:
    """Parses a number above 0, or inf. Raises ArgumentTypeError."""
    return _number(text, lambda value: value > 0, "a number above 0")


def plot_file(text: str) -> Path:
    """Parses the name of a PNG or SVG. Raises ArgumentTypeError."""
    path = Path(text)
    if path.suffix not in (".png", ".svg"):
        raise argparse.ArgumentTypeError(f"{text!r} ends in neither .png nor .svg")
    return path


def _number(text: str, is_valid: Callable[[float], bool], expected: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not is_valid(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not {expected}")
    return value


CALIBRATION_TOKENS = 8192
RATIO = 0.4
TOKENS = 50_000
SECONDS = 300.0
QUANTIZE_TOKENS = 32_768
_DTYPES = next(setting.choices for setting in SETTINGS if setting.name == "dtype")


@dataclass(frozen=True, slots=True)
class ConvertSettings:
    """A GGUF file and the folder to write."""

    gguf: Path
    folder: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchSettings:
    """A model to download, with its exit and adapters."""

    model: str
    revision: str | None
    download_dir: Path
    hf_token: str | None
    exit: str | None = None
    adapters: tuple[str, ...] = ()
    """URIs; those of the hub may end with @REVISION."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitSettings:
    """The model, the file to write, and the parameters of the fit."""

    model: str
    revision: str | None
    download_dir: Path
    hf_token: str | None
    out: Path
    ratio: float
    tokens: int
    seconds: float
    temperature: float
    seed: int
    dtype: str


QuantizeScheme = Literal["w4a16", "w4a8", "w8a16", "w8a8"]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeSettings:
    """The model, the folder to write, and what it is calibrated on."""

    model: str
    revision: str | None
    download_dir: Path
    hf_token: str | None
    out: Path
    scheme: QuantizeScheme
    head: bool
    calibration: Path | None
    tokens: int
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationSettings:
    """The model, the file to write, and the text."""

    model: str
    revision: str | None
    download_dir: Path
    hf_token: str | None
    out: Path
    text: Path | None
    tokens: int
    seconds: float
    seed: int
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorSettings:
    """The form of the output, and the file for measured rates, if any."""

    json: bool
    save: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingSettings:
    """The folder of the flight recorder and the time to print."""

    folder: Path | None
    group: str
    seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """The server to measure, its requests, and what is written."""

    url: str
    model: str | None
    api_key: str | None
    endpoint: Literal["completions", "chat"]
    request_rate: tuple[float, ...]
    max_concurrency: int | None
    num_prompts: int
    num_warmups: int
    input_len: int
    output_len: int
    ignore_eos: bool
    temperature: float
    seed: int
    slo_ttft_ms: float | None
    slo_itl_ms: float | None
    json: Path | None
    plot: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionSettings:
    """The shell that completes."""

    shell: Literal["bash", "zsh", "fish"]


FLIGHT_HELP = "folder of the flight recorder, 4 MiB per rank; default: $PHALANX_FLIGHT_RECORDER_DIR, else none"


class FitSpec(msgspec.Struct, frozen=True, kw_only=True, tag="exit"):
    """Input of the fitting process on stdin, for an exit."""

    model_dir: str
    out: str
    ratio: float = RATIO
    """Fraction of the layers that draft."""
    tokens: int = TOKENS
    """Tokens to generate."""
    seconds: float = SECONDS
    """Time limit of generation."""
    temperature: float = 1.0
    seed: int = 0
    dtype: str = "auto"


class QuantizeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Input of the quantising process on stdin."""

    model_dir: str
    out: str
    scheme: QuantizeScheme
    calibration: str | None = None
    """File of text; by default the model writes text."""
    tokens: int = QUANTIZE_TOKENS
    """Tokens of text, some of which are held out."""
    dtype: str = "auto"
    head: bool = False
    """Whether the output head is rounded too."""


class CalibrationSpec(msgspec.Struct, frozen=True, kw_only=True, tag="calibration"):
    """Input of the fitting process on stdin, for a calibration of compressed pages."""

    model_dir: str
    out: str
    text: str = ""
    """File; empty: the model generates the text."""
    tokens: int = CALIBRATION_TOKENS
    """Maximum tokens of text."""
    seconds: float = SECONDS
    """Time limit of generation."""
    seed: int = 1
    dtype: str = "auto"


def add_convert(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `convert`."""
    convert = commands.add_parser("convert", help="make a folder of safetensors and tokenizer from a GGUF file")
    convert.add_argument("gguf", type=Path, metavar="GGUF")
    convert.add_argument("folder", type=Path, metavar="DIR")


def add_fetch(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `fetch`."""
    add = commands.add_parser("fetch", help="download a model, for caches that groups only read").add_argument
    add("model", metavar="MODEL", help="org/name, or a URI of hf, s3, gs or oci")
    add("--revision", help="branch, tag or commit of a model of the hub")
    add("--exit", metavar="URI", help="URI of the model's exit, downloaded too")
    text = "URI of an adapter, downloaded too (with a revision: hf://org/name@REVISION); may be given several times"
    add("--adapter", dest="adapters", action="append", default=[], metavar="URI", help=text)
    add("--download-dir", type=Path, metavar="DIR", help="folder for downloaded and converted models")


def add_fit(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `fit-exit`."""
    add = commands.add_parser("fit-exit", help="fit the exit by which a model's first layers draft for it").add_argument
    add("model", metavar="MODEL", help="as for serve: folder, .gguf file, org/name, or a URI")
    add("--out", type=Path, required=True, metavar="FILE", help="the safetensors file to write, for --speculative-exit")
    add("--revision", help="branch, tag or commit of a model of the hub")
    add("--ratio", type=share, default=RATIO, metavar="SHARE", help="share of the layers that draft")
    add("--tokens", type=positive, default=TOKENS, metavar="N", help="tokens that the model generates to fit the exit on")
    add("--seconds", type=seconds, default=SECONDS, metavar="S", help="longest time of generation")
    add("--temperature", type=seconds, default=1.0, metavar="T", help="temperature of generation")
    add("--seed", type=positive, default=1, metavar="N", help="seed of generation: equal seeds give equal files")
    add("--dtype", choices=_DTYPES, default="auto", help="dtype of weights during generation")
    add("--download-dir", type=Path, metavar="DIR", help="folder for downloaded and converted models")


def add_quantize(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `quantize`."""
    text = "write a checkpoint of compressed-tensors from one in bf16, fp16 or fp32, and print what it costs in perplexity"
    add = commands.add_parser("quantize", help=text).add_argument
    add("model", metavar="MODEL", help="as for serve: folder, .gguf file, org/name, or a URI")
    add("--scheme", choices=get_args(QuantizeScheme), required=True, help="bits of weights and activations")
    add("--head", action="store_true", help="round the output head too; a tied one becomes a linear of its own")
    add("--out", type=Path, required=True, metavar="FOLDER", help="the folder to make")
    text = "UTF-8 text to calibrate on and to measure perplexity with; default: text that the model writes"
    add("--calibration", type=Path, metavar="FILE", help=text)
    add("--tokens", type=positive, default=QUANTIZE_TOKENS, metavar="N", help="tokens of that text; a quarter is held out")
    add("--revision", help="branch, tag or commit of a model of the hub")
    add("--dtype", choices=_DTYPES, default="auto", help="dtype of computation")
    add("--download-dir", type=Path, metavar="DIR", help="folder for downloaded and converted models")


def add_calibration(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `calibrate-kv`."""
    text = "measure how a model's compressed keys and values are to be rounded"
    add = commands.add_parser("calibrate-kv", help=text).add_argument
    add("model", metavar="MODEL", help="as for serve: folder, .gguf file, org/name, or a URI")
    add("--out", type=Path, required=True, metavar="FILE", help="the file to write, for --kv-cache-calibration")
    add("--text", type=Path, metavar="FILE", help="text like that of the requests; default: the model generates it")
    add("--tokens", type=positive, default=CALIBRATION_TOKENS, metavar="N", help="maximum tokens of text")
    add("--seconds", type=seconds, default=SECONDS, metavar="S", help="longest time of generation")
    add("--seed", type=positive, default=1, metavar="N", help="seed of generation: equal seeds give equal files")
    add("--dtype", choices=_DTYPES, default="auto", help="dtype of weights")
    add("--revision", help="branch, tag or commit of a model of the hub")
    add("--download-dir", type=Path, metavar="DIR", help="folder for downloaded and converted models")


def add_doctor(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `doctor`."""
    text = "show what this machine offers to ranks, and what will be slow or broken; exit code 1 if anything will be"
    add = commands.add_parser("doctor", help=text).add_argument
    add("--json", action="store_true", help="print the records and verdicts as JSON")
    add("--save", type=Path, metavar="FILE", help="write the measured rates, for PHALANX_DEVICE_RATES")


def add_recording(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `recording`."""
    add = commands.add_parser("recording", help="print the flight recorder of this pod's ranks, one JSON line each").add_argument
    add("--seconds", type=seconds, metavar="S", help="entries of the last seconds; default: all")
    add("--flight-recorder-dir", type=Path, metavar="DIR", help=FLIGHT_HELP)


def add_bench(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `bench`, with the names of `vllm bench serve`."""
    add = commands.add_parser(
        "bench", help="measure TTFT, TPOT, ITL, throughput and goodput of an OpenAI-compatible URL"
    ).add_argument
    add("url", metavar="URL", help="for example http://127.0.0.1:8000 (/v1 is added)")
    add("--model", metavar="NAME", help="model at the URL; default: its first one")
    add("--api-key", metavar="KEY", help="key of the server; default: $OPENAI_API_KEY")
    add("--endpoint", choices=("completions", "chat"), default="completions", help="API of the requests")
    rates = "mean requests per second, with exponential gaps; several are measured in turn; default: inf, bounded by concurrency"
    add("--request-rate", type=above_zero, nargs="+", default=[float("inf")], metavar="R", help=rates)
    bound = "maximum requests in flight; default: 16 without a rate, else unbounded"
    add("--max-concurrency", type=positive, metavar="N", help=bound)
    add("--num-prompts", type=positive, default=64, metavar="N", help="requests at each rate (64)")
    add("--num-warmups", type=natural, default=2, metavar="N", help="requests before the first measurement (2)")
    add("--input-len", type=positive, default=128, metavar="N", help="words of a prompt, about as many tokens (128)")
    add("--output-len", type=positive, default=64, metavar="N", help="maximum tokens of an answer (64)")
    add("--ignore-eos", action="store_true", help="make every answer as long as --output-len")
    add("--temperature", type=seconds, default=0.0, metavar="T", help="temperature of the answers (0)")
    add("--seed", type=natural, default=0, metavar="N", help="seed of prompts, gaps and answers (0)")
    add("--slo-ttft", dest="slo_ttft_ms", type=above_zero, metavar="MS", help="maximum TTFT of a good request")
    add("--slo-itl", dest="slo_itl_ms", type=above_zero, metavar="MS", help="maximum mean ITL of a good request")
    add("--json", type=Path, metavar="FILE", help="write settings and figures")
    add("--plot", type=plot_file, metavar="FILE", help="draw the distributions of TTFT, TPOT and ITL; .png or .svg")


def add_completion(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `completion`."""
    add = commands.add_parser("completion", help="print the script by which a shell completes commands and flags").add_argument
    add("shell", choices=("bash", "zsh", "fish"), help="the shell that sources it")


def bench_settings(flags: argparse.Namespace, environment: Mapping[str, str]) -> BenchSettings:
    """Returns the settings of `bench`."""
    own = {field.name: getattr(flags, field.name) for field in fields(BenchSettings)}
    key = flags.api_key or environment.get("OPENAI_API_KEY")
    return BenchSettings(**{**own, "api_key": key, "request_rate": tuple(flags.request_rate)})


def command_settings(
    flags: argparse.Namespace,
) -> ConvertSettings | FetchSettings | FitSettings | CalibrationSettings | QuantizeSettings | DoctorSettings:
    """Returns the settings of the parsed command."""
    if flags.command == "doctor":
        return DoctorSettings(json=flags.json, save=flags.save)
    if flags.command == "convert":
        return ConvertSettings(flags.gguf, flags.folder)
    source = {name: getattr(flags, name) for name in ("model", "revision", "download_dir", "hf_token")}
    if flags.command == "fetch":
        return FetchSettings(**source, exit=flags.exit, adapters=tuple(flags.adapters))
    if flags.command == "quantize":
        own = {name: getattr(flags, name) for name in ("out", "scheme", "head", "calibration", "tokens", "dtype")}
        return QuantizeSettings(**source, **own)
    if flags.command == "calibrate-kv":
        calibration = {name: getattr(flags, name) for name in ("out", "text", "tokens", "seconds", "seed", "dtype")}
        return CalibrationSettings(**source, **calibration)
    fit = {name: getattr(flags, name) for name in ("out", "ratio", "tokens", "seconds", "temperature", "seed", "dtype")}
    return FitSettings(**source, **fit)


def lora_module(text: str) -> tuple[str, str]:
    """Parses NAME=PATH. Raises ArgumentTypeError."""
    name, _, path = text.partition("=")
    if not name or not path:
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=PATH")
    return name, path
