"""Reads the command line that `flags` declares. An invalid flag exits with code 2 and names flag and value."""

import argparse
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx_api import labels
from phalanx_api.command_line.config_file import parse_arguments
from phalanx_api.engine_config import EngineConfig
from phalanx_frontend.auth.api_keys import ApiKey, KeysUnreadable, gather_keys
from phalanx_frontend.auth.oidc import OidcInvalid, OidcSettings, read_oidc
from phalanx_frontend.auth.service_token import ServiceToken, open_token
from phalanx_frontend.logs import LogFormat
from phalanx_frontend.tls import CertificateFiles
from phalanx_frontend.tracing.otlp import TracingSettingInvalid, TracingSettings, read_tracing
from phalanx_runtime.checkpoint.overrides import NO_OVERRIDES, AssetOverrides, read_overrides
from phalanx_runtime.commands import (
    BenchSettings,
    CalibrationSettings,
    CompletionSettings,
    ConvertSettings,
    DoctorSettings,
    FetchSettings,
    FitSettings,
    QuantizeSettings,
    RecordingSettings,
    bench_settings,
    command_settings,
)
from phalanx_runtime.flag_checks import check_flags, served_names
from phalanx_runtime.flags import command_parsers, ignored_flags, make_parser, own_values, serve_words


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """The served model and where to find it."""

    model: str
    """Folder, .gguf file, org/name if no such path exists, or a URI of file, hf, s3, gs or oci."""
    revision: str | None
    """Branch, tag or commit on the hub."""
    served_names: list[str]
    """Names of the model in requests. Default: the last path element of `model`."""
    draft_model: str | None
    """Draft model with the same tokenizer, written as `model`."""
    draft_exit: str | None
    """File or URI of an exit made by `fit-exit`."""
    download_dir: Path
    cached_only: bool
    """Use only models in `download_dir`, which may be read-only."""
    hf_token: str | None
    lora_modules: tuple[tuple[str, str], ...] = ()
    """Name and folder of each adapter that is loaded at the start."""
    lora_dir: Path | None = None
    """Folder of the adapters that requests may load and unload, if they may."""
    lora_secrets_dir: Path | None = None
    """Folder with a folder for each Secret that adapters of the service may name."""
    asset_overrides: AssetOverrides = NO_OVERRIDES
    config_overrides: Mapping[str, Any] = field(default_factory=dict)
    """Fields in place of those of config.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSettings:
    """The group and this pod's place in it."""

    name: str
    """Set by the operator. Default: the host name."""
    revision: str
    """Set by the operator."""
    tensor_parallel_size: int
    pipeline_parallel_size: int
    num_pods: int
    pod_index: int
    """Pod 0 is the leader."""
    leader_host: str
    master_port: int
    """Rendezvous port; rank r listens on `master_port + 1 + r`."""
    token: ServiceToken | None
    """Authenticates routers, pods and ranks. Without it: one pod, no link."""
    key: str
    """Secret of this group's pods, set by the operator."""
    flight_dir: Path | None = None
    """Folder of the flight recorder."""
    tls: CertificateFiles | None = None
    """This pod's certificate: routers and other pods are reached by mutual TLS."""
    is_in_pod: bool = False
    """The operator made this pod, which tries to load its model until it can be had."""

    @property
    def world_size(self) -> int:
        """Ranks of the group."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def local_world_size(self) -> int:
        """Ranks of this pod."""
        return self.world_size // self.num_pods


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """This pod's HTTP server."""

    host: str
    port: int
    api_keys: tuple[ApiKey, ...]
    """Valid keys; empty disables authentication, unless `oidc` is set."""
    oidc: OidcSettings | None = None
    image_hosts: tuple[str, ...] = ()
    """Of images by https; empty: data: URLs only."""
    allowed_origins: tuple[str, ...] = ()
    """Of web pages; empty: browsers let none read responses."""
    tracing: TracingSettings | None = None
    health_port: int | None = None
    """Port that answers probes without TLS."""
    shutdown_timeout: float
    """Seconds for open streams after SIGTERM; keep it below the pod's grace period."""


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """The command line of `phalanx-runtime serve`."""

    model: ModelSettings
    engine: EngineConfig
    group: GroupSettings
    http: HttpSettings
    log_format: LogFormat = "auto"
    without_effect: tuple[tuple[str, str], ...] = ()
    """Flags of vLLM that are accepted, and why they have no effect."""
    abbreviated: tuple[tuple[str, str], ...] = ()
    """Flags of which the beginning was given, each with that beginning first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """Bounds and sampling of an answer; null: the server's or model's default."""

    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """The command line of `phalanx-runtime run`."""

    model: ServeSettings
    prompt: str
    """-: it is read from stdin."""
    system: str
    options: AnswerOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSettings:
    """The command line of `phalanx-runtime chat`."""

    target: str | ServeSettings
    """URL of a server, or a model for this machine."""
    model_name: str | None
    """Of the model at the URL."""
    api_key: str | None
    system: str
    options: AnswerOptions


PrintingCommand = CompletionSettings | DoctorSettings | RecordingSettings
SmallCommand = (
    BenchSettings | CalibrationSettings | ConvertSettings | FetchSettings | FitSettings | QuantizeSettings | PrintingCommand
)
Settings = ServeSettings | RunSettings | ChatSettings | SmallCommand


def read_settings(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    parser_class: type[argparse.ArgumentParser] = argparse.ArgumentParser,
) -> Settings:
    """Returns the settings of the command, or calls the parser's `error`."""
    parser = make_parser(parser_class)
    flags = _parse(parser, arguments, parser_class)
    flags.download_dir = getattr(flags, "download_dir", None) or _default_download_dir(environment)
    flags.hf_token = environment.get("HF_TOKEN") or None
    if "flight_recorder_dir" in flags:
        flags.flight_recorder_dir = flags.flight_recorder_dir or flight_dir(environment)
    if flags.command == "recording":
        group = environment.get(labels.ENV_GROUP, "")
        return RecordingSettings(folder=flags.flight_recorder_dir, group=group, seconds=flags.seconds)
    match flags.command:
        case "serve":
            return _serve_settings(parser, flags, environment)
        case "run":
            model = _serve_settings(parser, _for_serve(parser, flags), environment)
            return RunSettings(model=model, prompt=flags.prompt, system=flags.system, options=_answer_options(flags))
        case "chat":
            return _chat_settings(parser, flags, environment)
        case "bench":
            return bench_settings(flags, environment)
        case "completion":
            return CompletionSettings(shell=flags.shell)
        case _:
            return command_settings(flags)


def _parse(
    parser: argparse.ArgumentParser, arguments: Sequence[str], parser_class: type[argparse.ArgumentParser]
) -> argparse.Namespace:
    name = arguments[0] if arguments else ""
    if name not in command_parsers(parser):
        return parser.parse_args(arguments)
    words, abbreviated = serve_words(arguments[1:]) if name == "serve" else (arguments[1:], ())
    flags = parse_arguments(lambda kind: command_parsers(make_parser(kind))[name], words, parser_class, name)
    flags.command, flags.abbreviated = name, abbreviated
    return flags


def _for_serve(parser: argparse.ArgumentParser, flags: argparse.Namespace) -> argparse.Namespace:
    """Returns the flags of `serve` with the values of those that another command has too."""
    return argparse.Namespace(**{**vars(parser.parse_args(["serve", flags.model])), **vars(flags)})


def _chat_settings(parser: argparse.ArgumentParser, flags: argparse.Namespace, environment: Mapping[str, str]) -> ChatSettings:
    target: str | ServeSettings = flags.model
    if not flags.model.startswith(("http://", "https://")):
        if flags.model_name or flags.server_key:
            parser.error(f"--model-name and --api-key need the URL of a server, not {flags.model}")
        target = _serve_settings(parser, _for_serve(parser, flags), environment)
    return ChatSettings(
        target=target,
        model_name=flags.model_name,
        api_key=flags.server_key or environment.get("OPENAI_API_KEY"),
        system=flags.system,
        options=_answer_options(flags),
    )


def _answer_options(flags: argparse.Namespace) -> AnswerOptions:
    return AnswerOptions(max_tokens=flags.max_tokens, temperature=flags.temperature, seed=flags.seed)


def _serve_settings(parser: argparse.ArgumentParser, flags: argparse.Namespace, environment: Mapping[str, str]) -> ServeSettings:
    engine, notes = own_values(flags)
    notes += ignored_flags(parser, flags)
    check_flags(parser, flags)
    return ServeSettings(
        model=_model_settings(parser, flags),
        engine=EngineConfig(**engine),
        group=_group_settings(parser, flags, environment),
        http=HttpSettings(
            host=flags.host,
            port=flags.port,
            api_keys=_read_keys(parser, flags.api_key, flags.api_keys_file),
            health_port=flags.health_port,
            oidc=_read_oidc(parser, flags),
            image_hosts=flags.allowed_media_domains,
            allowed_origins=flags.allowed_origins,
            tracing=_read_tracing(parser, environment),
            shutdown_timeout=flags.shutdown_timeout,
        ),
        log_format=flags.log_format,
        without_effect=tuple(notes),
        abbreviated=flags.abbreviated,
    )


def _asset_overrides(parser: argparse.ArgumentParser, flags: argparse.Namespace) -> AssetOverrides:
    try:
        return read_overrides(
            flags.chat_template,
            template_kwargs=flags.default_chat_template_kwargs,
            generation=flags.override_generation_config,
            has_generation=flags.generation_config == "auto",
        )
    except ValueError as error:
        parser.error(str(error))


def _model_settings(parser: argparse.ArgumentParser, flags: argparse.Namespace) -> ModelSettings:
    return ModelSettings(
        model=flags.model,
        revision=flags.revision,
        served_names=served_names(flags),
        draft_model=flags.speculative_draft_model,
        draft_exit=flags.speculative_exit,
        download_dir=flags.download_dir,
        cached_only=flags.cached_only,
        hf_token=flags.hf_token,
        lora_modules=tuple(flags.lora_modules),
        lora_secrets_dir=flags.lora_secrets_dir,
        lora_dir=flags.lora_dir if flags.allow_runtime_lora_updating else None,
        asset_overrides=_asset_overrides(parser, flags),
        config_overrides=flags.hf_overrides,
    )


def _group_settings(parser: argparse.ArgumentParser, flags: argparse.Namespace, environment: Mapping[str, str]) -> GroupSettings:
    return GroupSettings(
        name=environment.get(labels.ENV_GROUP) or socket.gethostname(),
        revision=environment.get(labels.ENV_REVISION, ""),
        tensor_parallel_size=flags.tensor_parallel_size,
        pipeline_parallel_size=flags.pipeline_parallel_size,
        num_pods=flags.nnodes,
        pod_index=flags.node_rank,
        leader_host=flags.master_addr,
        master_port=flags.master_port,
        token=_read_token(parser, flags.token_file),
        key=environment.get(labels.ENV_GROUP_KEY, ""),
        flight_dir=flags.flight_recorder_dir,
        is_in_pod=labels.ENV_POD_INDEX in environment,
        tls=CertificateFiles.in_folder(flags.internal_tls_dir, is_mutual=True) if flags.internal_tls_dir else None,
    )


def _read_tracing(parser: argparse.ArgumentParser, environment: Mapping[str, str]) -> TracingSettings | None:
    try:
        return read_tracing(environment, environment.get(labels.ENV_GROUP) or "phalanx-runtime")
    except TracingSettingInvalid as error:
        parser.error(str(error))


def flight_dir(environment: Mapping[str, str]) -> Path | None:
    """Returns the folder of the flight recorder that the operator sets."""
    folder = environment.get(labels.ENV_FLIGHT_RECORDER)
    return Path(folder) if folder else None


def _default_download_dir(environment: Mapping[str, str]) -> Path:
    """Returns the pod's cache volume if writable, else the user's cache."""
    if os.access(labels.CACHE_DIR, os.W_OK):
        return Path(labels.CACHE_DIR)
    base = environment.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "phalanx"


def _read_token(parser: argparse.ArgumentParser, file: Path | None) -> ServiceToken | None:
    try:
        return None if file is None else open_token(file)
    except (OSError, ValueError) as error:
        parser.error(f"--token-file {file}: {error}")


def _read_oidc(parser: argparse.ArgumentParser, flags: argparse.Namespace) -> OidcSettings | None:
    try:
        return read_oidc(flags)
    except OidcInvalid as error:
        parser.error(str(error))


def _read_keys(parser: argparse.ArgumentParser, values: Sequence[str], file: Path | None) -> tuple[ApiKey, ...]:
    try:
        keys = tuple(gather_keys(values, file))
    except KeysUnreadable as error:
        parser.error(f"--api-key, --api-keys-file: {error}")
    if limited := [key.name for key in keys if key.quota is not None]:
        parser.error(f"--api-keys-file: {limited[0]} has a quota, which only a router enforces")
    return keys
