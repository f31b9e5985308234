"""Converts the tokenizer in a GGUF file's metadata to a tokenizer.json.

Byte-level BPE (`gpt2`) and SentencePiece's BPE (`llama`). The pre-tokenizer of `tokenizer.ggml.pre` follows llama.cpp, where
transformers may differ: `smollm` splits off every digit, so " ½" is two pieces.
"""

from collections.abc import Callable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from phalanx_runtime.checkpoint.gguf.file import GgufFile
from phalanx_runtime.errors import ModelError

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_UNBOUNDED_LENGTH = 10**30
_SPACE = "\u2581"
"""The letter of a space in a SentencePiece vocabulary."""
_KEEP_SPACES = {"<unk>", "<s>", "<|endoftext|>"}
"""Of Phi-3. Its other special tokens take the spaces and line ends after them, which no file says; llama.cpp knows it, too."""
_MAX_PIECE_CHARS = 1000
"""Pieces are cut at every place, so a longer one, of a broken file, would take minutes."""
_TURN_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")
"""Files of Gemma and Phi-3 may say only which token ends a text; llama.cpp finds these by name."""
_HARMONY = {"<|return|>", "<|call|>"}
"""Tokens that only vocabularies of gpt-oss have. Their `<|end|>` ends a message within a turn."""

_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_END = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}|{_OTHERS}"
_GPT4O = rf"{_BEFORE}{_UPPER}*{_LOWER}+{_END}|{_BEFORE}{_UPPER}+{_LOWER}*{_END}|\p{{N}}{{1,3}}|{_OTHERS}"


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _digits_then_gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _by_pattern(pattern: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    return lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


_PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _gpt2,
    "smollm": _digits_then_gpt2,
    "llama-bpe": _by_pattern(_LLAMA3),
    "llama3": _by_pattern(_LLAMA3),
    "llama-v3": _by_pattern(_LLAMA3),
    "qwen2": _by_pattern(_QWEN2),
    "deepseek-r1-qwen": _by_pattern(_QWEN2),
    "dbrx": _by_pattern(_LLAMA3),
    "smaug-bpe": _by_pattern(_LLAMA3),
    "tekken": _by_pattern(_TEKKEN),
    "gpt-4o": _by_pattern(_GPT4O),
}
_LIKE_LLAMA3 = {"llama-bpe", "llama3", "llama-v3", "tekken"}
"""Pre-tokenizers with `ignore_merges`, where a piece that is a token is not split; texts begin with `bos` by default."""


def read_tokenizer(file: GgufFile) -> Tokenizer:
    """Returns the tokenizer. Raises ModelError."""
    kind = file.text("tokenizer.ggml.model")
    if kind not in _MODELS:
        raise ModelError(f"{file.path}: tokenizer.ggml.model is {kind!r}; one of these is expected: {', '.join(_MODELS)}")
    tokens = file.texts("tokenizer.ggml.tokens")
    if len({*tokens}) < len(tokens):
        raise ModelError(f"{file.path}: tokenizer.ggml.tokens has a token twice")
    try:
        tokenizer = _MODELS[kind](file, tokens)
        _add_tokens(tokenizer, file, tokens)
        _add_template(tokenizer, file, tokens)
    except ModelError:
        raise
    except Exception as error:  # the library raises no other type
        raise ModelError(f"{file.path}: tokenizer.ggml.tokens and tokenizer.ggml.merges make no tokenizer: {error}") from error
    return tokenizer


def _byte_level(file: GgufFile, tokens: list[str]) -> Tokenizer:
    pre = file.text("tokenizer.ggml.pre")
    if pre not in _PRE_TOKENIZERS:
        supported = ", ".join(sorted(_PRE_TOKENIZERS))
        raise ModelError(f"{file.path}: tokenizer.ggml.pre is {pre!r}; one of these is expected: {supported}")
    merges = [_pair(file, merge) for merge in file.texts("tokenizer.ggml.merges")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre in _LIKE_LLAMA3))
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(file: GgufFile, tokens: list[str]) -> Tokenizer:
    """Returns a BPE: two neighbours whose text is the token with the highest score are joined first; others are bytes."""
    vocabulary = {token: index for index, token in enumerate(tokens)}
    kinds = _numbers(file, "token_type", len(tokens))
    longest = max((len(token) for token, kind in zip(tokens, kinds, strict=True) if kind == _NORMAL), default=0)
    if longest > _MAX_PIECE_CHARS:
        raise ModelError(f"{file.path}: tokenizer.ggml.tokens has a token of {longest} characters, at most {_MAX_PIECE_CHARS}")
    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == _UNKNOWN), None)
    merges = _merges(vocabulary, _numbers(file, "scores", len(tokens)), kinds)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    has_prefix = file.metadata.get("tokenizer.ggml.add_space_prefix", True) is True
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if has_prefix else spaces
    parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if has_prefix else parts)
    return tokenizer


_MODELS: dict[str, Callable[[GgufFile, list[str]], Tokenizer]] = {"gpt2": _byte_level, "llama": _sentencepiece}
"""By `tokenizer.ggml.model`."""


def _merges(vocabulary: dict[str, int], scores: list[float], kinds: list[float]) -> list[tuple[str, str]]:
    ranked = []
    for token, index in vocabulary.items():
        if kinds[index] == _NORMAL:
            pairs = ((token[:at], token[at:]) for at in range(1, len(token)))
            known = [
                (vocabulary[left], vocabulary[right], left, right)
                for left, right in pairs
                if left in vocabulary and right in vocabulary
            ]
            ranked += [(-scores[index], *pair) for pair in known]
    return [(left, right) for *_, left, right in sorted(ranked)]


def _numbers(file: GgufFile, name: str, count: int) -> list[float]:
    """Returns a number for each token. Raises ModelError."""
    values = file.metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(values, list) or len(values) != count or not all(isinstance(value, int | float) for value in values):
        raise ModelError(f"{file.path}: tokenizer.ggml.{name} must be a list of {count} numbers")
    return [float(value) for value in values if isinstance(value, int | float)]


def _pair(file: GgufFile, merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not space:
        raise ModelError(f"{file.path}: tokenizer.ggml.merges has {merge!r}, a pair is expected")
    return left, right


def _add_tokens(tokenizer: Tokenizer, file: GgufFile, tokens: list[str]) -> None:
    kinds = file.metadata.get("tokenizer.ggml.token_type", [])
    if not isinstance(kinds, list):
        raise ModelError(f"{file.path}: tokenizer.ggml.token_type must be a list")
    control = [token for token, kind in zip(tokens, kinds, strict=False) if kind == _CONTROL]
    user_defined = [token for token, kind in zip(tokens, kinds, strict=False) if kind == _USER_DEFINED]
    strips = file.text("general.architecture") == "phi3" and file.text("tokenizer.ggml.model") == "llama"

    def added(token: str, special: bool) -> AddedToken:
        return AddedToken(token, rstrip=strips and token not in _KEEP_SPACES, normalized=False, special=special)

    tokenizer.add_special_tokens([added(token, special=True) for token in control])
    tokenizer.add_tokens([added(token, special=False) for token in user_defined])


def _add_template(tokenizer: Tokenizer, file: GgufFile, tokens: list[str]) -> None:
    before = _special(file, tokens, "bos") if _adds_bos(file) else None
    after = _special(file, tokens, "eos") if file.flag("tokenizer.ggml.add_eos_token") else None
    if before is None and after is None:
        if file.text("tokenizer.ggml.model") == "gpt2":
            tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
        return
    single = [piece for piece in (before, "$A", after) if piece is not None]
    second = [piece.replace("$A", "$B") + ":1" for piece in single]
    special = [(token, tokenizer.token_to_id(token)) for token in {before, after} if token is not None]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=single + second, special_tokens=special)


def _adds_bos(file: GgufFile) -> bool:
    """As llama.cpp: SentencePiece vocabularies, and those of Llama 3's kind, add it unless the file says no."""
    default = file.text("tokenizer.ggml.model") == "llama" or file.text("tokenizer.ggml.pre") in _LIKE_LLAMA3
    return file.metadata.get("tokenizer.ggml.add_bos_token", default) is True


def _special(file: GgufFile, tokens: list[str], name: str) -> str | None:
    index = file.number(f"tokenizer.ggml.{name}_token_id")
    if index is None:
        return None
    if not 0 <= index < len(tokens):
        raise ModelError(f"{file.path}: tokenizer.ggml.{name}_token_id is {index}, the vocabulary has {len(tokens)} tokens")
    return tokens[index]


def end_token_ids(file: GgufFile) -> list[int]:
    """Returns the tokens that end a text or a turn of a chat. Raises ModelError."""
    tokens = file.texts("tokenizer.ggml.tokens")
    ends = {*_TURN_ENDS, *(_special(file, tokens, name) for name in ("eos", "eot", "eom"))}
    if _HARMONY <= {*tokens}:
        ends = ends - {"<|end|>"} | _HARMONY | {"<|endoftext|>"}
    return [index for index, token in enumerate(tokens) if token in ends]


def tokenizer_config(file: GgufFile) -> dict[str, object]:
    """Returns the content of tokenizer_config.json."""
    tokens = file.texts("tokenizer.ggml.tokens")
    named = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    special = {f"{short}_token": _special(file, tokens, name) for name, short in named.items()}
    config: dict[str, object] = {name: token for name, token in special.items() if token is not None}
    template = file.text("tokenizer.chat_template")
    if template is not None:
        config["chat_template"] = template
    length = file.number(f"{file.text('general.architecture')}.context_length")
    return config | {
        "add_bos_token": _adds_bos(file),
        "add_eos_token": file.flag("tokenizer.ggml.add_eos_token"),
        "clean_up_tokenization_spaces": False,
        "model_max_length": _UNBOUNDED_LENGTH if length is None else length,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
