"""Requests of our own API, /v1/generate and /v1/batch, as pydantic checks them. A field that is not here is refused."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from phalanx_frontend.fields import INT32_MAX, INT64_MAX, Share, Stops, TokenId
from phalanx_frontend.schemas import GenerationRequest

MAX_BATCH = 256
"""Entries of one batch: more would hold one connection for very long, and one client could fill the queue at once."""
_SHARED = (
    "model", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens"
)  # fmt: skip


class GenerateRequest(BaseModel):
    """POST /v1/generate: either `prompt` or `prompt_tokens`. `deadline_ms` counts from the request's arrival."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())

    model: str | None = None
    prompt: str | None = None
    prompt_tokens: list[TokenId] | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    top_p: Share | None = None
    top_k: int | None = Field(default=None, ge=-1, le=INT32_MAX)
    min_p: float | None = Field(default=None, ge=0, le=1, allow_inf_nan=False)
    seed: int | None = Field(default=None, ge=-INT64_MAX - 1, le=INT64_MAX)
    stop: Stops = []
    stop_token_ids: list[TokenId] | None = Field(default=None, max_length=128)
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(default=None, ge=0)
    priority: int | None = Field(default=None, ge=-INT32_MAX - 1, le=INT32_MAX)
    deadline_ms: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    tenant: str | None = Field(default=None, max_length=256)
    stream: bool | None = None

    def generation(self) -> GenerationRequest:
        """What it has in common with the OpenAI calls."""
        return GenerationRequest.model_validate({name: getattr(self, name) for name in _SHARED})


class BatchRequest(BaseModel):
    """POST /v1/batch. Each entry is a body of /v1/generate without `stream`; a bad one fails alone, in its place."""

    model_config = ConfigDict(strict=True, extra="forbid")

    requests: Annotated[
        list[Any],
        Field(min_length=1, max_length=MAX_BATCH),
        WithJsonSchema({"type": "array", "minItems": 1, "maxItems": MAX_BATCH, "items": {}}),
    ]
