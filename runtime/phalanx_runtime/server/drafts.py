"""What a group drafts with, found on this machine before its ranks start."""

import logging
import threading
from dataclasses import dataclass

from phalanx_runtime.checkpoint.locate import locate
from phalanx_runtime.checkpoint.locate_exit import locate_exit
from phalanx_runtime.errors import ModelError
from phalanx_runtime.settings import ServeSettings

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Drafts:
    """The draft model's folder and the file of an exit, where they are wanted; `missing` says why one was not found."""

    draft_dir: str = ""
    exit: str = ""
    missing: str = ""


NO_DRAFTS = Drafts()


def find_drafts(settings: ServeSettings, stop: threading.Event) -> Drafts:
    """What the settings ask for, fetched if need be. Blocks. A draft that cannot be had stops no group: it serves without."""
    cache, token, cached_only = settings.download_dir, settings.hf_token, settings.cached_only
    try:
        if settings.speculative_draft_model is not None and settings.node_rank == 0:
            model = settings.speculative_draft_model
            found = locate(model, cache_dir=cache, hf_token=token, progress=log.info, stop=stop, cached_only=cached_only)
            return Drafts(draft_dir=str(found.dir))
        if settings.speculative_exit is not None:
            uri = settings.speculative_exit
            file = locate_exit(uri, cache_dir=cache, hf_token=token, progress=log.info, stop=stop, cached_only=cached_only)
            return Drafts(exit=str(file))
    except ModelError as error:
        log.warning("the group starts without speculation", extra={"why": str(error)})
        return Drafts(missing=str(error))
    return NO_DRAFTS
