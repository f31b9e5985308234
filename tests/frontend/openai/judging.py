"""A scripted backend of a model as Qwen3-Reranker."""

from tokenizers import AddedToken, Tokenizer

from phalanx_api import wire
from phalanx_frontend.backend import Delta
from tests.frontend.fakes import EMBEDDING, FakeBackend, tiny_assets, tiny_tokenizer_json

JUDGE = wire.Embedding(size=EMBEDDING.size, pooling="last", reranker="qwen3")


def tokenizer_json(*words: str) -> bytes:
    """Returns the tokenizer.json of `tiny_tokenizer` with these words as tokens."""
    tokenizer = Tokenizer.from_str(tiny_tokenizer_json().decode())
    tokenizer.add_tokens([AddedToken(word, special=False) for word in words])
    return tokenizer.to_str().encode()


TOKENIZER = Tokenizer.from_str(tokenizer_json("yes", "no").decode())
YES, NO = TOKENIZER.token_to_id("yes"), TOKENIZER.token_to_id("no")


def judge(request: wire.Request) -> list[Delta]:
    """Answers with a logprob that depends on the prompt."""
    [token] = request.sampling.allowed_token_ids or []
    logprob = -float(sum(request.prompt) % 7) - (token == YES)
    detail = wire.TokenDetail(logprob=logprob, rank=0, top_ids=[], top_logprobs=[])
    return [Delta(index=0, tokens=[token], finish="length", details=[detail])]


ONE_LABEL = wire.Classification(labels=["LABEL_0"], activation="sigmoid")


def judge_backend(*words: str, max_model_len: int = 2048, classes: wire.Classification | None = None) -> FakeBackend:
    """Returns a backend whose tokenizer has these words as tokens. `classes`: of a model with a classification head."""
    assets = tiny_assets(embedding=JUDGE, max_model_len=max_model_len, classification=classes)
    files = {**assets.files, "tokenizer.json": tokenizer_json(*words)}
    assets = wire.make_assets(files, assets.served_names, max_model_len, assets.eos_token_ids)
    return FakeBackend(judge, assets) if classes is None else FakeBackend(assets=assets)
