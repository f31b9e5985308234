"""The routes of models: in Anthropic's form for requests with the header `anthropic-version`, in OpenAI's for others."""

import re
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request

from phalanx_api import wire
from phalanx_frontend.errors import MODELS_PATH, invalid, is_anthropic
from phalanx_frontend.openai.context import ServerContext
from phalanx_frontend.openai.routes import CurrentCaller, model_card
from phalanx_frontend.openai.served_model import usable_names

ACTIVE = "active"
"""`lifecycle` of each model that is served."""
PAGE_SIZES = range(1, 1001)


def model_routes(server: ServerContext) -> APIRouter:
    """Builds the routes of models."""
    routes = APIRouter(tags=["models"])

    @routes.get(MODELS_PATH)
    async def models(
        request: Request,
        caller: CurrentCaller,
        limit: str = "20",
        after_id: str | None = None,
        before_id: str | None = None,
    ) -> dict[str, Any]:
        """The model names that requests with this API key may use. The parameters are Anthropic's: OpenAI's list is whole."""
        assets = server.assets()
        names = usable_names(assets, caller)
        if not is_anthropic(request.scope):
            return {"object": "list", "data": [model_card(server, assets, name) for name in names]}
        stages = request.query_params.getlist("lifecycle[]")
        shown = names if not stages or ACTIVE in stages else []
        return page_of_models([model_info(server, assets, name) for name in shown], _limit(limit), after_id, before_id)

    @routes.get(f"{MODELS_PATH}/{{name:path}}")
    async def model(request: Request, name: str, caller: CurrentCaller) -> dict[str, Any]:
        """One model by name."""
        model = await server.model()
        describe = model_info if is_anthropic(request.scope) else model_card
        return describe(server, model.assets, model.name_for(name, caller))

    return routes


def _limit(text: str) -> int:
    """Returns the number of models in a page. Raises ApiError 400."""
    if not re.fullmatch("[0-9]{1,4}", text) or int(text) not in PAGE_SIZES:
        raise invalid("limit", f"limit: a whole number from {PAGE_SIZES[0]} to {PAGE_SIZES[-1]}")
    return int(text)


def model_info(server: ServerContext, assets: wire.Assets, name: str) -> dict[str, Any]:
    """Returns a model in Anthropic's form."""
    created = datetime.fromtimestamp(int(server.first_served_s(assets)), UTC)
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": ACTIVE,
        "deprecated_at": None,
        "retires_at": None,
        "line": None,
        "max_input_tokens": assets.max_model_len,
        "max_tokens": assets.max_model_len,
        "capabilities": None,
    }


def page_of_models(models: list[dict[str, Any]], limit: int, after_id: str | None, before_id: str | None) -> dict[str, Any]:
    """Returns one page in Anthropic's form. Raises ApiError 400.

    `has_more`: whether more models precede the page if `before_id` is sent, or else follow it.
    """
    ids = [model["id"] for model in models]
    for name, id in (("after_id", after_id), ("before_id", before_id)):
        if id is not None and id not in ids:
            raise invalid(name, f"{name}: there is no model {id}")
    if after_id is not None and before_id is not None:
        raise invalid("before_id", "before_id: send it or after_id, not both")
    if before_id is not None:
        stop = ids.index(before_id)
        start = max(0, stop - limit)
        has_more = start > 0
    else:
        start = 0 if after_id is None else ids.index(after_id) + 1
        stop = start + limit
        has_more = stop < len(ids)
    page = models[start:stop]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return {"data": page, "has_more": has_more, "first_id": first, "last_id": last}
