"""Fields that OpenAI or vLLM define and this door does not implement yet, with the values that ask for nothing.

A field here with any other value is refused by name: a client must never believe that it was obeyed. Fields that are
hints or bookkeeping (`store`, `metadata`, `prompt_cache_key`, ...) and fields nobody defined are ignored, as vLLM does.
"""

from collections.abc import Mapping

from phalanx_frontend.errors import invalid

_OFF = (None, False)
_EMPTY_LIST: tuple[object, ...] = (None, [])

NEUTRAL: Mapping[str, tuple[object, ...]] = {
    # OpenAI, both endpoints
    "service_tier": (None, "auto", "default"),
    # OpenAI completions
    "best_of": (None, 1),
    "suffix": (None, ""),
    # OpenAI chat
    "functions": _EMPTY_LIST,
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
    # vLLM
    "length_penalty": (None, 1, 1.0),
    "use_beam_search": _OFF,
    "truncate_prompt_tokens": (None,),
    "prompt_embeds": (None,),
    "guided_json_object": _OFF,
    "structural_tag": (None,),
    "guided_whitespace_pattern": (None,),
    "continue_final_message": _OFF,
    "chat_template": (None,),
    "documents": _EMPTY_LIST,
}


def refuse_unsupported(extra: Mapping[str, object]) -> None:
    """Raises ApiError 400 for the first field that would be disobeyed in silence."""
    for name, value in extra.items():
        neutral = NEUTRAL.get(name)
        if neutral is not None and not any(_is_same(value, known) for known in neutral):
            raise invalid(name, f"{name} is not supported yet; leave it out", "unsupported_parameter")


def _is_same(value: object, known: object) -> bool:
    """Equal, and not merely as False equals 0: `logprobs: 0` asks for something that `false` does not."""
    return isinstance(value, bool) == isinstance(known, bool) and value == known
