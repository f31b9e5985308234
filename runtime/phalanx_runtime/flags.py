"""The command line of `phalanx-runtime`. Flags have vLLM's names where the meaning is equal.

`phalanx_api.engine_config` declares the engine's flags, `commands` those of small commands.
"""

import argparse
import json
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from phalanx_api import labels
from phalanx_api.command_line.config_file import add_config_flag
from phalanx_api.command_line.vllm import FOREIGN, VALUES, own_words
from phalanx_api.engine_config import SETTINGS, Setting
from phalanx_frontend.auth.oidc import add_oidc_flags
from phalanx_frontend.auth.origins import add_origin_flag
from phalanx_frontend.images.source import add_image_flags
from phalanx_frontend.logs import LOG_FORMAT_HELP, LOG_FORMATS
from phalanx_runtime.commands import (
    FLIGHT_HELP,
    add_bench,
    add_calibration,
    add_completion,
    add_convert,
    add_doctor,
    add_fetch,
    add_fit,
    add_quantize,
    add_recording,
    flag_type,
    lora_module,
    natural,
    port,
    positive,
    seconds,
)

_MODEL_HELP = "folder, .gguf file, org/name, or a URI of file, hf, s3, gs or oci (docs/models.md)"


def make_parser(parser_class: type[argparse.ArgumentParser] = argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Returns the parser of all commands."""
    parser = parser_class("phalanx-runtime", description="Serve a language model from this machine or pod.")
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="serve a model", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    serve.add_argument("model", metavar="MODEL", help=_MODEL_HELP)
    _add_engine_flags(serve)
    _add_adapter_flags(serve)
    _add_group_flags(serve)
    _add_http_flags(serve)
    _add_foreign_flags(serve)
    add_convert(commands)
    add_fetch(commands)
    add_fit(commands)
    add_quantize(commands)
    add_calibration(commands)
    add_doctor(commands)
    add_recording(commands)
    add_bench(commands)
    add_completion(commands)
    run = commands.add_parser("run", help="answer one prompt on this machine")
    run.add_argument("model", metavar="MODEL", help=_MODEL_HELP)
    run.add_argument("prompt", metavar="PROMPT", help="the prompt; -: read it from stdin")
    chat = commands.add_parser("chat", help="talk to a model, at a URL or on this machine")
    chat.add_argument("model", metavar="URL|MODEL", help="URL of an OpenAI-compatible server, or a model as for serve")
    chat.add_argument("--model-name", metavar="NAME", help="model at the URL; default: its first one")
    chat.add_argument("--api-key", dest="server_key", metavar="KEY", help="key of the server; default: $OPENAI_API_KEY")
    for command in (run, chat):
        _add_answer_flags(command)
        _add_engine_flags(command)
    for command in command_parsers(parser).values():
        add_config_flag(command)
        command.allow_abbrev = False
    return parser


def command_parsers(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    """Returns the parser of each command."""
    commands = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return dict(commands.choices)


def actions_of(command: argparse.ArgumentParser) -> Sequence[argparse.Action]:
    """Returns the flags and arguments of a command, without those of vLLM that are not ours."""
    return tuple(action for action in command._actions if action.help != argparse.SUPPRESS)


def serve_words(words: Sequence[str]) -> tuple[list[str], tuple[tuple[str, str], ...]]:
    """Returns the words of `serve` without those of vLLM's form, and the flags that were written by their beginning alone.

    `extraArgs` of services have such abbreviations of our flags: they were allowed. Remove with release 0.2.0.
    """
    actions = command_parsers(make_parser())["serve"]._actions
    names = {flag for action in actions for flag in action.option_strings}
    own = {flag: action for action in actions if action.help != argparse.SUPPRESS for flag in action.option_strings}
    whole, abbreviated = [], []
    for word in own_words(words):
        given, equals, value = word.partition("=")
        meant = [flag for flag in own if flag.startswith(given)] if given.startswith("-") and given not in names else []
        if given not in ("-", "--") and len({own[flag].dest for flag in meant}) == 1:
            abbreviated.append((given, meant[0]))
            word = f"{meant[0]}{equals}{value}"
        whole.append(word)
    return whole, tuple(abbreviated)


def json_object(text: str) -> dict[str, Any]:
    """Parses a JSON object. Raises ArgumentTypeError."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r:.200} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r:.200} is not a JSON object")
    return value


def own_values(flags: argparse.Namespace) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Returns the values of the engine's settings, and why those of vLLM have no effect that have none."""
    values: dict[str, Any] = {}
    notes = []
    for setting in SETTINGS:
        given = getattr(flags, setting.name)
        values[setting.name], why = VALUES.get(setting.name, {}).get(given, (given, ""))
        if why:
            notes.append((f"{setting.flag} {given}", why))
    return values, notes


def ignored_flags(parser: argparse.ArgumentParser, flags: argparse.Namespace) -> list[tuple[str, str]]:
    """Returns the given flags of vLLM that have no effect, with the reasons, or refuses one that would have one."""
    notes = []
    for flag in FOREIGN:
        value = getattr(flags, flag.dest, None)
        if value is not None and flag.is_refused(value):
            given = "" if flag.kind == "switch" else f" {value}"
            parser.error(f"argument {flag.names[0]}{given}: {flag.reason}")
        if value is not None:
            notes.append((flag.names[0], flag.note))
    return notes


def _add_answer_flags(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--system", default="", metavar="TEXT", help="system message")
    add("--max-tokens", type=positive, metavar="N", help="maximum tokens of an answer; default: those that fit")
    add("--temperature", type=seconds, metavar="T", help="0: always the most probable token; default: as the model says")
    add("--seed", type=natural, metavar="N", help="seed of sampling; default: random")


def _add_engine_flags(serve: argparse.ArgumentParser) -> None:
    """Adds the flags of model, engine and parallelism."""
    add = serve.add_argument
    add("--revision", help="branch, tag or commit of a model of the hub")
    add("--served-model-name", nargs="+", metavar="NAME", help="names of the model in requests; default: its last path element")
    add("--speculative-draft-model", metavar="MODEL", help="the draft model: folder, .gguf file, org/name, or a URI")
    add("--speculative-exit", metavar="FILE", help="file or URI of the exit that fit-exit made, for self-drafts")
    add("--download-dir", type=Path, metavar="DIR", help="folder for downloaded and converted models")
    add("--chat-template", metavar="FILE", help="chat template in place of the model's: a Jinja file, or its text")
    text = "variables of the chat template that requests do not set, such as '{\"enable_thinking\": false}'"
    add("--default-chat-template-kwargs", type=json_object, default={}, metavar="JSON", help=text)
    text = "auto: sampling has the defaults of the model's generation_config.json; vllm: only end tokens are read"
    add("--generation-config", choices=("auto", "vllm"), default="auto", help=text)
    text = "defaults of sampling in place of the model's, such as '{\"temperature\": 0.6}'"
    add("--override-generation-config", type=json_object, default={}, metavar="JSON", help=text)
    text = 'fields in place of those of config.json, such as \'{"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}\''
    add("--hf-overrides", type=json_object, default={}, metavar="JSON", help=text)
    add("--cached-only", action="store_true", help="serve only models already in the download folder, which may be read-only")
    for setting in SETTINGS:
        _add_setting(serve, setting)
    add("--tensor-parallel-size", "-tp", type=positive, default=1, metavar="N", help="ranks that share each layer")
    add("--pipeline-parallel-size", "-pp", type=positive, default=1, metavar="N", help="pipeline stages of the layers")


def _add_adapter_flags(serve: argparse.ArgumentParser) -> None:
    add = serve.add_argument
    loras = "adapters in PEFT's format that are loaded at the start, each with its name in requests and its folder"
    add("--lora-modules", nargs="+", type=lora_module, default=[], metavar="NAME=PATH", help=loras)
    updates = "let requests load and unload adapters by /v1/load_lora_adapter and /v1/unload_lora_adapter"
    add("--allow-runtime-lora-updating", action="store_true", help=updates)
    secrets = "folder with a folder for each Secret that adapters of the service may name for their download"
    add("--lora-secrets-dir", type=Path, metavar="DIR", help=secrets)
    add("--lora-dir", type=Path, metavar="DIR", help="folder that has all adapters which requests may load")


class _Choices(tuple[str, ...]):
    """Choices of a flag. `foreign` values are accepted, but not shown."""

    foreign: Container[object] = ()

    def __contains__(self, value: object) -> bool:
        return super().__contains__(value) or value in self.foreign


def _add_setting(serve: argparse.ArgumentParser, setting: Setting) -> None:
    names = [setting.flag, *([setting.short] if setting.short else []), *setting.aliases]
    foreign = VALUES.get(setting.name, {})
    if setting.type is bool:
        serve.add_argument(*names, action=argparse.BooleanOptionalAction, default=setting.default, help=setting.help)
    elif setting.choices is not None:
        choices = _Choices(setting.choices)
        choices.foreign = foreign
        serve.add_argument(*names, choices=choices, default=setting.default, help=setting.help)
    else:
        kind = flag_type(lambda text: text if text in foreign else setting.parse(text))
        serve.add_argument(*names, type=kind, default=setting.default, metavar=setting.metavar, help=setting.help)


def _add_foreign_flags(serve: argparse.ArgumentParser) -> None:
    """Adds the flags of vLLM that are not ours, which `settings` ignores or refuses."""
    for flag in FOREIGN:
        if flag.kind == "switch":
            serve.add_argument(
                *flag.names,
                dest=flag.dest,
                action=argparse.BooleanOptionalAction,
                default=argparse.SUPPRESS,
                help=argparse.SUPPRESS,
            )
        else:
            nargs = "+" if flag.kind == "values" else None
            serve.add_argument(*flag.names, dest=flag.dest, nargs=nargs, default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def _add_group_flags(serve: argparse.ArgumentParser) -> None:
    add = serve.add_argument
    add("--nnodes", type=positive, default=1, metavar="N", help="pods of the group")
    add("--node-rank", type=natural, default=0, metavar="I", help="index of this pod; pod 0 is the leader")
    add("--master-addr", default="127.0.0.1", metavar="HOST", help="address of the leader for the other pods")
    add(
        "--master-port",
        type=port,
        default=labels.RENDEZVOUS_PORT,
        metavar="PORT",
        help="port of the rendezvous; ranks use the ports after it",
    )
    add("--token-file", type=Path, metavar="FILE", help="the service's token, which routers, pods and ranks prove")
    add("--flight-recorder-dir", type=Path, metavar="DIR", help=FLIGHT_HELP)
    internal = "folder with tls.crt, tls.key and ca.crt: mutual TLS with routers, other pods and their ranks"
    add("--internal-tls-dir", type=Path, metavar="DIR", help=internal)


def _add_http_flags(serve: argparse.ArgumentParser) -> None:
    add = serve.add_argument
    add("--host", default="127.0.0.1", help="address of the HTTP server; empty: all, IPv4 and IPv6")
    add("--port", type=port, default=labels.HTTP_PORT, help="port of the HTTP server; 0 takes any free port")
    add("--health-port", type=port, metavar="PORT", help="port that answers probes without TLS, and nothing else")
    add("--api-key", nargs="+", action="extend", default=[], metavar="KEY", help="keys that requests must carry one of")
    add(
        "--api-keys-file",
        type=Path,
        metavar="FILE",
        help="keys with names (docs/security.md): a JSON array, or lines of `name key [priority] [field=value ...]`",
    )
    add_oidc_flags(serve)
    add_origin_flag(serve)
    add_image_flags(serve)
    add("--shutdown-timeout", type=seconds, default=20.0, metavar="S", help="seconds for open streams after SIGTERM")
    add("--log-format", choices=LOG_FORMATS, default="auto", help=LOG_FORMAT_HELP)
