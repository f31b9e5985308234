"""What flags replace of a model: its chat template, the defaults of answers, and fields of config.json.

Changed fields of config.json make a folder of links to the model's files with a config.json of its own: ranks, assets and the
model hash all read that one, so that groups with other fields exchange neither pages nor requests.
"""

import itertools
import json
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx_api import wire
from phalanx_runtime.checkpoint.folder import read_json
from phalanx_runtime.errors import ModelError

TEMPLATE, GENERATION = "chat_template.jinja", "generation_config.json"
_SET_BY_REQUESTS = ("messages", "tools", "add_generation_prompt")
"""Variables of a chat template that a default cannot have."""
_ROPES = ("rope_parameters", "rope_scaling")
_ADDED_KEYS = (*_ROPES, "rope_theta", "partial_rotary_factor", "max_position_embeddings", "tie_word_embeddings", "sliding_window")
"""Fields that a config.json may lack and an override may add."""
_KEPT_ROPE_KEYS = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")
_STRETCHES = ("yarn", "linear")
"""Types of a rotary embedding that extend the context by their factor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AssetOverrides:
    """Replaces parts of the assets that the API server reads."""

    chat_template: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template that requests do not set."""
    generation: Mapping[str, Any] = field(default_factory=dict)
    """Fields of generation_config.json."""
    has_generation: bool = True
    """Sampling has the model's defaults; otherwise only its end tokens are read."""

    def apply(self, files: dict[str, bytes]) -> None:
        """Changes the files of the assets. Raises ModelError for a variable that the chat template lacks."""
        if self.chat_template is not None:
            files[TEMPLATE] = self.chat_template.encode()
        if not self.has_generation:
            files.pop(GENERATION, None)
        if self.generation:
            files[GENERATION] = json.dumps(json.loads(files.get(GENERATION, b"{}")) | self.generation).encode()
        if self.template_kwargs:
            _check_variables(files, self.template_kwargs)
            files[wire.TEMPLATE_KWARGS_FILE] = json.dumps(self.template_kwargs).encode()


NO_OVERRIDES = AssetOverrides()


def _check_variables(files: Mapping[str, bytes], names: Iterable[str]) -> None:
    from phalanx_frontend.text.chat import ChatTemplateError, read_chat_template  # Jinja: only this flag needs it

    try:
        template = read_chat_template(files)
    except ChatTemplateError as error:
        raise ModelError(f"--default-chat-template-kwargs: {error}") from error
    for name in names:
        if template is None or name not in template.variables:
            raise ModelError(f"--default-chat-template-kwargs: the chat template has no variable {name}")


def read_overrides(
    template: str | None, *, template_kwargs: Mapping[str, Any], generation: Mapping[str, Any], has_generation: bool
) -> AssetOverrides:
    """Returns the overrides. `template`: a file, or the text of a chat template. Raises ValueError, which names the flag."""
    if taken := [name for name in template_kwargs if name in _SET_BY_REQUESTS]:
        raise ValueError(f"argument --default-chat-template-kwargs: {taken[0]} comes from the request")
    if generation:
        _check_generation(generation)
    return AssetOverrides(
        chat_template=None if template is None else _read_template(template),
        template_kwargs=template_kwargs,
        generation=generation,
        has_generation=has_generation,
    )


def _read_template(text: str) -> str:
    """Returns the template in a file, or the text itself if it has the marks of one."""
    from phalanx_frontend.text.chat import ChatTemplate, ChatTemplateError  # Jinja: only this flag needs it

    try:
        source = text if "{{" in text or "{%" in text else Path(text).read_text()
        ChatTemplate(source, {})
    except OSError as error:
        raise ValueError(f"argument --chat-template: {text}: {error.strerror or error}") from error
    except (UnicodeDecodeError, ChatTemplateError) as error:
        raise ValueError(f"argument --chat-template: {text:.80}: {error}") from error
    return source


def _check_generation(values: Mapping[str, Any]) -> None:
    from phalanx_frontend.openai.sampling import GENERATION_CONFIG_FIELDS, read_defaults  # pydantic models

    known = (*GENERATION_CONFIG_FIELDS, "max_new_tokens")
    if unknown := [name for name in values if name not in known]:
        raise ValueError(f"argument --override-generation-config: {unknown[0]} is not one of {', '.join(known)}")
    try:
        read_defaults(json.dumps(values).encode())
    except ValueError as error:
        raise ValueError(f"argument --override-generation-config: {error}") from error


_Contents = tuple[set[str], Mapping[str, Any]]
"""Names of the files, and the changed config.json."""


class FolderOverlay:
    """Folders with a changed config.json, until this object ends."""

    def __init__(self, overrides: Mapping[str, Any]) -> None:
        self._overrides = overrides
        self._root = Path(tempfile.mkdtemp(prefix="phalanx-config-")) if overrides else None
        if self._root is not None:
            weakref.finalize(self, shutil.rmtree, self._root, ignore_errors=True)
        self._numbers = itertools.count()
        self._made: dict[Path, tuple[Path, _Contents]] = {}

    def apply(self, folder: Path) -> Path:
        """Returns the folder, or one of links with a changed config.json: the former one if it is equal. Raises ModelError."""
        if self._root is None:
            return folder
        config = overridden(read_json(folder / "config.json"), self._overrides)
        made = self._root / str(next(self._numbers))
        try:
            contents = {path.name for path in folder.iterdir()}, config
            if folder in self._made and self._made[folder][1] == contents:
                return self._made[folder][0]
            _link(folder, made, config)
        except OSError as error:
            shutil.rmtree(made, ignore_errors=True)
            raise ModelError(f"--hf-overrides: cannot write {made}: {error.strerror or error}") from error
        self._made[folder] = made, contents
        return made


def _link(folder: Path, made: Path, config: Mapping[str, Any]) -> None:
    made.mkdir()
    for path in folder.iterdir():
        if path.name != "config.json":
            (made / path.name).symlink_to(path.absolute())
    (made / "config.json").write_text(json.dumps(config))


def overridden(config: Mapping[str, Any], overrides: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Returns config.json with other fields; objects named *_config are merged. Raises ModelError."""
    result = dict(config)
    for name, value in overrides.items():
        if name not in config and (name not in _ADDED_KEYS or "text_config" in config):
            where = "text_config has it" if name in (config.get("text_config") or {}) else "config.json has no such field"
            raise ModelError(f"--hf-overrides: {path}{name}: {where}")
        inner = config.get(name)
        is_part = isinstance(inner, dict) and isinstance(value, dict) and name.endswith("_config")
        result[name] = overridden(inner or {}, value, f"{path}{name}.") if is_part else value
    named = [name for name in _ROPES if name in overrides]
    if len(named) > 1:
        raise ModelError(f"--hf-overrides: {path}rope_parameters and rope_scaling are two names of one field: give one")
    if named:
        _replace_rope(result, config, overrides, named[0])
    elif "rope_theta" in overrides:
        for name in _ROPES:
            if "rope_theta" in (result.get(name) or {}):
                result[name] = {**result[name], "rope_theta": overrides["rope_theta"]}
    return result


def _replace_rope(result: dict[str, Any], config: Mapping[str, Any], overrides: Mapping[str, Any], name: str) -> None:
    """Writes one rotary embedding: it keeps the base, and extends the context by its factor if that has no override."""
    former, given = config.get("rope_parameters") or config.get("rope_scaling") or {}, overrides[name]
    given = {"rope_type": "default"} if given is None else given
    if not isinstance(given, dict) or not isinstance(former, dict):
        raise ModelError(f"--hf-overrides: {name} must be a JSON object, not {given!r:.80}")
    if "full_attention" in former and "full_attention" not in given:
        raise ModelError(f"--hf-overrides: {name} needs full_attention and sliding_attention, as config.json has")
    kept = {key: former[key] for key in _KEPT_ROPE_KEYS if key in former}
    kept |= {"rope_theta": overrides["rope_theta"]} if "rope_theta" in kept and "rope_theta" in overrides else {}
    rope = kept | given
    kind, factor, longest = rope.get("rope_type", rope.get("type")), rope.get("factor"), config.get("max_position_embeddings")
    if kind == "yarn" and longest is not None:
        rope.setdefault("original_max_position_embeddings", former.get("original_max_position_embeddings", longest))
    original = rope.get("original_max_position_embeddings", longest)
    if kind in _STRETCHES and "max_position_embeddings" not in overrides:
        if isinstance(factor, int | float) and isinstance(original, int):
            result["max_position_embeddings"] = int(original * factor)
    for other in _ROPES:
        result.pop(other, None)
    result[name] = rope
