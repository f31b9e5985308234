"""What the supervisor of a pod starts ranks with: the located model and drafts, and the specs of its ranks."""

import asyncio
import logging
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from phalanx_api import wire
from phalanx_runtime.checkpoint.assets import read_assets
from phalanx_runtime.checkpoint.locate import locate, locate_exit
from phalanx_runtime.checkpoint.overrides import FolderOverlay
from phalanx_runtime.checkpoint.pooling import read_outputs
from phalanx_runtime.errors import ModelError
from phalanx_runtime.progress import open_line, show_loading
from phalanx_runtime.rank_spec import RankReady, RankSpec
from phalanx_runtime.server.http.adapter_sources import adapter_source
from phalanx_runtime.server.supervision.pod import Launch, ignore_weights
from phalanx_runtime.server.supervision.supervisor import SupervisorParts
from phalanx_runtime.settings import ModelSettings, ServeSettings

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LocatedDraft:
    """The draft to load."""

    draft_dir: str = ""
    """Folder of the draft model."""
    exit: str = ""
    """File of the self-draft exit."""
    missing: str = ""
    """Reason, if not found."""


NO_DRAFT = LocatedDraft()


def find_drafts(settings: ModelSettings, pod_index: int, stop: threading.Event) -> LocatedDraft:
    """Locates or downloads the configured draft. A missing draft only disables speculation."""
    cache, token, cached_only = settings.download_dir, settings.hf_token, settings.cached_only
    try:
        if settings.draft_model is not None and pod_index == 0:
            model = settings.draft_model
            found = locate(model, cache_dir=cache, hf_token=token, progress=log.info, stop=stop, cached_only=cached_only)
            return LocatedDraft(draft_dir=str(found.dir))
        if settings.draft_exit is not None:
            uri = settings.draft_exit
            file = locate_exit(uri, cache_dir=cache, hf_token=token, progress=log.info, stop=stop, cached_only=cached_only)
            return LocatedDraft(exit=str(file))
    except ModelError as error:
        log.warning("the group starts without speculation", extra={"why": str(error)})
        return LocatedDraft(missing=str(error))
    return NO_DRAFT


def make_parts(settings: ServeSettings, stop: threading.Event, rank_command: Sequence[str]) -> SupervisorParts:
    """Functions of the supervisor. `stop` aborts a download."""
    drafts: dict[Path, LocatedDraft] = {}
    versions: dict[Path, str] = {}
    source, overlay = settings.model, FolderOverlay(settings.model.config_overrides)
    line = open_line(sys.stderr) if settings.log_format != "json" else None

    def locate_model() -> Path:
        local = locate(
            source.model,
            revision=source.revision,
            cache_dir=source.download_dir,
            hf_token=source.hf_token,
            progress=log.info,
            stop=stop,
            cached_only=source.cached_only,
            bar=None if line is None else line.show,
        )
        folder = overlay.apply(local.dir)
        versions[folder], drafts[folder] = local.version, find_drafts(source, settings.group.pod_index, stop)
        return folder

    async def locate_in_thread() -> Path:
        return await asyncio.to_thread(locate_model)

    def make_specs(launch: Launch, folder: Path) -> list[RankSpec]:
        return make_rank_specs(settings, launch, folder, drafts[folder], versions[folder])

    def assets(folder: Path, ready: RankReady) -> wire.Assets:
        max_model_len = min(ready.max_model_len, ready.num_pages * ready.page_size)
        embedding, classification = read_outputs(folder, ready.served, settings.engine)
        parsers = wire.ParserNames(tool_call=settings.engine.tool_call_parser, reasoning=settings.engine.reasoning_parser)
        read = partial(read_assets, embedding=embedding, classification=classification, image_obstacle=ready.image_obstacle)
        return read(folder, source.served_names, max_model_len, parsers=parsers, overrides=source.asset_overrides)

    return SupervisorParts(
        locate=locate_in_thread,
        make_specs=make_specs,
        read_assets=assets,
        command=rank_command,
        is_in_pod=settings.group.is_in_pod,
        activity_changed=show_loading(line),
        weights_loaded=ignore_weights if line is None else line.set_loaded,
        fetch_adapter=adapter_source(settings, stop).refusal,
    )


def make_rank_specs(
    settings: ServeSettings, launch: Launch, folder: Path, drafts: LocatedDraft = NO_DRAFT, model_version: str = ""
) -> list[RankSpec]:
    """Specs of this pod's consecutive ranks."""
    group = settings.group
    local = group.local_world_size
    first = group.pod_index * local
    return [
        RankSpec(
            rank=first + i,
            world_size=group.world_size,
            pipeline_parallel_size=group.pipeline_parallel_size,
            local_world_size=local,
            local_rank=i,
            incarnation=launch.incarnation,
            hosts=[host for host in launch.hosts for _ in range(local)],
            base_port=group.master_port,
            token=launch.key,
            model_dir=str(folder),
            model_version=model_version,
            engine_socket=launch.engine_socket if first + i == 0 else "",
            engine=settings.engine,
            draft_dir=drafts.draft_dir,
            draft_exit=drafts.exit,
            draft_missing=drafts.missing or launch.without_draft,
            flight_dir=str(group.flight_dir or ""),
            tls_dir=str(group.tls.certificate.parent) if group.tls is not None else "",
        )
        for i in range(local)
    ]
