"""Scripts by which shells complete commands, flags and choices, made of the parser. Pure."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from phalanx_runtime.flags import actions_of, command_parsers

Shell = Literal["bash", "zsh", "fish"]
PROGRAM = "phalanx-runtime"
FUNCTION = "_phalanx_runtime"


@dataclass(frozen=True, slots=True)
class CompletedFlag:
    """A long flag."""

    name: str
    help: str
    takes_value: bool
    choices: tuple[str, ...]


def completion_script(parser: argparse.ArgumentParser, shell: Shell) -> str:
    """Returns the script for a shell to source."""
    commands = {name: _flags(command) for name, command in command_parsers(parser).items()}
    match shell:
        case "bash":
            return _bash(commands)
        case "zsh":
            return f"#compdef {PROGRAM}\nautoload -U +X bashcompinit && bashcompinit\n{_bash(commands)}"
        case "fish":
            return _fish(commands)


def _flags(command: argparse.ArgumentParser) -> list[CompletedFlag]:
    found = []
    for action in actions_of(command):
        choices = tuple(str(choice) for choice in action.choices or ())
        text = (action.help or "").partition(";")[0].replace("%(default)s", str(action.default))
        for name in action.option_strings:
            if name.startswith("--"):
                found.append(CompletedFlag(name, text, action.nargs != 0, choices))
    return found


def _bash(commands: Mapping[str, list[CompletedFlag]]) -> str:
    """After a flag with choices come these, after another flag with a value and for arguments files."""
    lines = [
        f"{FUNCTION}() {{",
        '  local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" words=""',
        "  COMPREPLY=()",
        '  if [ "$COMP_CWORD" -eq 1 ]; then',
        f"    COMPREPLY=($(compgen -W '{' '.join(commands)}' -- \"$word\"))",
        "    return",
        "  fi",
        '  case "${COMP_WORDS[1]} $before" in',
    ]
    for name, flags in commands.items():
        for flag in flags:
            if flag.choices:
                lines.append(f"    '{name} {flag.name}') words='{' '.join(flag.choices)}' ;;")
    lines += ["  esac", '  if [ -z "$words" ] && [ "${word:0:1}" = - ]; then', '    case "${COMP_WORDS[1]}" in']
    lines += [f"      {name}) words='{' '.join(flag.name for flag in flags)}' ;;" for name, flags in commands.items()]
    lines += [
        "    esac",
        "  fi",
        '  if [ -n "$words" ]; then',
        '    COMPREPLY=($(compgen -W "$words" -- "$word"))',
        "  else",
        '    COMPREPLY=($(compgen -f -- "$word"))',
        "  fi",
        "}",
        f"complete -o filenames -F {FUNCTION} {PROGRAM}",
    ]
    return "\n".join(lines) + "\n"


def _fish(commands: Mapping[str, list[CompletedFlag]]) -> str:
    lines = [f"complete -c {PROGRAM} -n __fish_use_subcommand -f -a '{' '.join(commands)}'"]
    for name, flags in commands.items():
        for flag in flags:
            line = f"complete -c {PROGRAM} -n '__fish_seen_subcommand_from {name}' -l {flag.name[2:]} -d '{_quoted(flag.help)}'"
            if flag.choices:
                line += f" -x -a '{' '.join(flag.choices)}'"
            lines.append(line + (" -r" if flag.takes_value and not flag.choices else ""))
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace("'", "\\'")
