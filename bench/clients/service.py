"""The service that clients use: a runtime with its model, behind a router with files and batches."""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench.frame.programs import Program, running

KEY = "sk-client"
MODEL = "model"
TEMPLATE = Path(__file__).with_name("chat_template.jinja")


@contextmanager
def service(
    model: Path, folder: Path, flags: Sequence[str] = (), names: Sequence[str] = (MODEL,), keys: Sequence[str] = (KEY,)
) -> Iterator[Program]:
    """Runs the service until the block ends; yields its router, which requires one of `keys`, if there are any."""
    token = folder / "token"
    token.write_text("a-token-of-the-service")
    serve = ["serve", str(model), "--served-model-name", *names, "--token-file", str(token), *flags]
    with ExitStack() as stack:
        runtime = stack.enter_context(running("runtime", "phalanx_runtime", serve, folder))
        leader = runtime.base_url.removeprefix("http://")
        route = ["serve", "--leaders", leader, "--token-file", str(token), "--batches-dir", str(folder / "batches")]
        yield stack.enter_context(running("router", "phalanx_router", [*route, *(["--api-key", *keys] if keys else [])], folder))


def with_tools(model: Path, folder: Path) -> Path:
    """Returns a folder with the model's files and a chat template that has tools."""
    folder.mkdir()
    for path in model.iterdir():
        if path.name != "tokenizer_config.json":
            (folder / path.name).symlink_to(path)
    config = json.loads((model / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE.read_text()}))
    return folder
