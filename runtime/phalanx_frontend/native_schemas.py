"""Requests of our own API, /v1/generate and /v1/batch, as pydantic checks them. A field that is not here is refused."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from phalanx_frontend.fields import Text, TokenIds
from phalanx_frontend.openai.schemas import CommonRequest, GenerationRequest

MAX_BATCH = 256
"""Entries of one batch: more would hold one connection for very long, and one client could fill the queue at once."""


class GenerateRequest(CommonRequest):
    """POST /v1/generate: either `prompt` or `prompt_tokens`, and how to go on from there."""

    model_config = ConfigDict(extra="forbid")

    prompt: Text | None = None
    prompt_tokens: TokenIds | None = None

    def generation(self) -> GenerationRequest:
        """What it has in common with the OpenAI calls."""
        return GenerationRequest.model_validate({name: getattr(self, name) for name in CommonRequest.model_fields})


class BatchRequest(BaseModel):
    """POST /v1/batch. Each entry is a body of /v1/generate without `stream`; a bad one fails alone, in its place."""

    model_config = ConfigDict(strict=True, extra="forbid")

    requests: Annotated[
        list[Any],
        Field(min_length=1, max_length=MAX_BATCH),
        WithJsonSchema({"type": "array", "minItems": 1, "maxItems": MAX_BATCH, "items": {}}),
    ]
