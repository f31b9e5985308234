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
    """Runs the program. Exits with status 2 for a bad flag or variable."""
    match sys.argv[1:]:
        case ["crd"]:
            print(crd_text(), end="")
        case ["run", *arguments]:
            _run(arguments)
        case _:
            sys.exit(_complain(USAGE))


def _run(arguments: list[str]) -> None:
    """Runs the operator. Imports take seconds; a signal during them exits with status 0."""
    before = signal.signal(signal.SIGTERM, _end_at_once)
    try:
        from phalanx_operator.settings import BadSetting, read_settings

        try:
            settings = read_settings(arguments)
        except BadSetting as error:
            sys.exit(_complain(str(error)))
        import uvloop

        from phalanx_operator import app, logs

        logs.set_up()
        uvloop.run(app.run(settings))
    finally:
        signal.signal(signal.SIGTERM, before)


def _end_at_once(number: int, frame: FrameType | None) -> NoReturn:
    """Exits at once: the lease is not held yet."""
    sys.exit(0)


def _complain(words: str) -> int:
    print(words, file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
