"""`phalanx-operator run` and `phalanx-operator crd`."""

import asyncio
import sys

import yaml

from phalanx_api.crd import definition
from phalanx_operator import app, logs
from phalanx_operator.settings import BadSetting, read_settings

USAGE = "usage: phalanx-operator run [flags] | phalanx-operator crd"


def crd_text() -> str:
    """The CustomResourceDefinition as YAML."""
    head = "# Generated from crds/phalanx_api by `make golden`. Do not edit.\n"
    return head + str(yaml.safe_dump(definition(), sort_keys=False, width=120))


def main() -> None:
    """The program. Ends with status 2 for a bad flag or variable."""
    match sys.argv[1:]:
        case ["crd"]:
            print(crd_text(), end="")
        case ["run", *arguments]:
            try:
                settings = read_settings(arguments)
            except BadSetting as error:
                sys.exit(_complain(str(error)))
            logs.set_up()
            asyncio.run(app.run(settings))
        case _:
            sys.exit(_complain(USAGE))


def _complain(words: str) -> int:
    print(words, file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
