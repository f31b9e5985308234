"""`phalanx-operator run` and `phalanx-operator crd`."""

import signal
import sys
from types import FrameType
from typing import NoReturn

USAGE = "usage: phalanx-operator run [flags] | phalanx-operator crd"


def crd_text() -> str:
    """Returns the CustomResourceDefinition as YAML."""
    import yaml

    from phalanx_api.crd import definition

    head = "# Generated from crds/phalanx_api by `make golden`. Do not edit.\n"
    return head + str(yaml.safe_dump(definition(), sort_keys=False, width=120))


def main() -> None:
    """Runs the program."""
    match sys.argv[1:]:
        case ["crd"]:
            print(crd_text(), end="")
        case ["run", *arguments]:
            _run(arguments)
        case ["-h" | "--help"]:
            print(USAGE)
        case _:
            sys.exit(_print_error(USAGE))


def _run(arguments: list[str]) -> None:
    """A signal during the imports, which take seconds, exits with 0."""
    before = signal.signal(signal.SIGTERM, _exit_now)
    try:
        from phalanx_operator.settings import BadSetting, read_settings

        try:
            settings = read_settings(arguments)
        except BadSetting as error:
            sys.exit(_print_error(str(error)))
        import uvloop

        from phalanx_operator import app, logs

        logs.prevent_core_dumps()
        logs.set_up()
        uvloop.run(app.run(settings))
    finally:
        signal.signal(signal.SIGTERM, before)


def _exit_now(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(0)


def _print_error(message: str) -> int:
    print(message, file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
