"""`python -m phalanx_runtime.doctor`: prints the table or JSON; exits with 1 if anything is slow or broken."""

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from phalanx_api.roofline import DeviceRates
from phalanx_runtime.doctor.read import read_machine
from phalanx_runtime.doctor.verdicts import Machine, Verdict, judge
from phalanx_runtime.rank.process.cgroup import System


def as_table(verdicts: Sequence[Verdict]) -> str:
    """Returns one line per check, and below a slow or broken one its reason and change."""
    widths = [max(len(verdict.check) for verdict in verdicts), max(len(verdict.status) for verdict in verdicts)]
    lines: list[str] = []
    for verdict in verdicts:
        lines.append(f"{verdict.status.ljust(widths[1])}   {verdict.check.ljust(widths[0])}   {verdict.value}")
        indent = " " * (widths[1] + 3)
        lines += [f"{indent}{word}: {text}" for word, text in (("why", verdict.reason), ("change", verdict.change)) if text]
    return "\n".join(lines) + "\n"


def as_json(machine: Machine, verdicts: Sequence[Verdict]) -> bytes:
    """Returns the record and the verdicts."""
    return msgspec.json.format(msgspec.json.encode({"machine": machine, "verdicts": list(verdicts)}), indent=2) + b"\n"


def rates_of(machine: Machine) -> DeviceRates:
    """Returns the measured rates of the slowest device, or of the processors, for `PHALANX_DEVICE_RATES`."""
    if not machine.devices:
        rates = (machine.copy_bytes_per_s, machine.matmul_flops_per_s)
        return DeviceRates(name="cpu", copy_bytes_per_s=rates[0], matmul_flops_per_s=rates[1])
    return DeviceRates(
        name=machine.devices[0].name,
        copy_bytes_per_s=min(device.copy_bytes_per_s for device in machine.devices),
        matmul_flops_per_s=min(device.matmul_flops_per_s for device in machine.devices),
    )


def main(arguments: Sequence[str]) -> int:
    """Runs the checks. Arguments: `json` or `table`, and the file for the rates, if any, which is opened first."""
    form, *files = arguments
    try:
        opened = [Path(file).open("wb") for file in files]
    except OSError as error:
        print(f"phalanx-runtime doctor: {error}", file=sys.stderr)
        return 1
    machine = read_machine(System())
    verdicts = judge(machine)
    for file in opened:
        with file:
            file.write(msgspec.json.encode(rates_of(machine)))
    sys.stdout.write(as_json(machine, verdicts).decode() if form == "json" else as_table(verdicts))
    return int(any(verdict.status != "ok" for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
