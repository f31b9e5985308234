"""Moves of requests with drafts: pages include the draft's layers only for the same draft. In float64."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from bench.moves.mover import Mover
from phalanx_api import moves, wire
from phalanx_api.speculation import CHAIN, Speculation, Tree, TreeShape
from phalanx_runtime.core.speculation.config import SpeculationConfig
from tests.runtime.drafts import save_draft, save_exit, save_target
from tests.runtime.moving_engines import RULES, Group, running_group
from tests.runtime.moving_requests import KINDS, make_request, moved_back_and_forth, undisturbed
from tests.runtime.ranks import Build
from tests.runtime.tiny import WINDOW

MODES: tuple[moves.MoveMode, ...] = ("precopy", "stop", "precopy")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("moves") / "model")


@pytest.fixture(scope="module")
def drafts(folder: Path) -> dict[str, dict[str, Any]]:
    """Speculation fields of a RankSpec, by name."""
    twin, noisy = save_draft(folder, folder.parent / "twin", noise=0.0), save_draft(folder, folder.parent / "noisy", noise=0.08)
    return {
        "twin": {"speculative_method": "draft", "draft_dir": str(twin)},
        "noisy": {"speculative_method": "draft", "draft_dir": str(noisy)},
        "layers": {
            "speculative_method": "self_draft",
            "draft_exit": str(save_exit(folder, folder.parent / "exit", noise=0.03)),
        },
        "nothing": {},
    }


def counts(groups: Sequence[Group]) -> tuple[int, int, int]:
    """Returns draft tokens, accepted ones, and accepted ones that were not the first child, in these groups."""
    found = [group.loop.speculation for group in groups if group.loop is not None]
    return (
        sum(sum(one.drafted) for one in found),
        sum(sum(one.accepted) for one in found),
        sum(one.branched for one in found),
    )


def run(
    folder: Path,
    settings: Sequence[dict[str, Any]],
    requests: list[wire.Request],
    pods: int = 1,
    tree: Tree = CHAIN,
    **parts: int,
) -> tuple[int, int, int]:
    """Moves all requests back and forth between two groups, compares their tokens, and returns `counts`."""
    with ExitStack() as stack:
        groups = []
        for fields in settings:
            method = fields.get("speculative_method", "none")
            methods = frozenset({method} - {"none"})
            rules = replace(
                RULES,
                speculation=SpeculationConfig(
                    method=method, num_tokens=6 if tree.widths else 3, is_adaptive=False, draft_methods=methods, tree=tree
                ),
            )
            build = Build(torch.float64, num_pages=120, speculative=fields, **parts)  # type: ignore[arg-type]
            groups.append(stack.enter_context(running_group(folder, [pods], build, rules=rules)))
        router = Mover([group.channel for group in groups])
        plain = undisturbed(router, [msgspec.structs.replace(one, speculation=Speculation("none")) for one in requests])
        assert moved_back_and_forth(router, requests, plain, MODES) > 0
        return counts(groups)


@pytest.mark.parametrize("pods", [1, 2], ids=["one", "tp2"])
def test_pages_of_the_same_draft_are_moved(folder: Path, drafts: dict[str, Any], pods: int) -> None:
    """The target as its own draft is always accepted after a move only if its pages moved too."""
    requests = [make_request(kind, **KINDS[kind]) for kind in ("greedy", "seeded")]
    proposed, accepted, _ = run(folder, [drafts["twin"], drafts["twin"]], requests, pods)
    assert proposed == accepted > 30


@pytest.mark.parametrize("method", ["draft", "self_draft"])
def test_parts_of_pages_move_beside_those_of_drafts(tmp_path: Path, method: str) -> None:
    """Pages of a twin have its layers, and parts have none."""
    mixed = save_target(tmp_path / "model", family="gemma3_text", layer_types=["sliding_attention", "full_attention"] * 2)
    twin = {"draft_dir": str(save_draft(mixed, tmp_path / "twin", noise=0.0))} if method == "draft" else {}
    requests = [make_request(kind, **KINDS[kind]) for kind in ("greedy", "seeded")]
    fields = {"speculative_method": method, **twin}
    proposed, accepted, _ = run(mixed, [fields, fields], requests, window=WINDOW, num_parts=60)
    assert proposed == accepted > 30 if method == "draft" else 0 < accepted < proposed


@pytest.mark.parametrize("other", ["noisy", "nothing", "layers"])
def test_groups_of_different_drafts_exchange_requests(folder: Path, drafts: dict[str, Any], other: str) -> None:
    kinds = ("greedy", "seeded", "schema", "penalised")
    requests = [make_request(kind, **(KINDS[kind] | {"seed": 8})) for kind in kinds]  # no object is complete before 40 tokens
    proposed, accepted, _ = run(folder, [drafts["noisy" if other == "layers" else "twin"], drafts[other]], requests)
    assert 0 < accepted <= proposed
    assert (accepted == proposed) == (other == "nothing"), "only the twin drafts, and is always accepted"


def test_requests_with_self_drafts_move(folder: Path, drafts: dict[str, Any]) -> None:
    requests = [make_request(kind, **sampling) for kind, sampling in KINDS.items()]
    proposed, accepted, _ = run(folder, [drafts["layers"], drafts["layers"]], requests)
    assert 0 < accepted < proposed


@pytest.mark.parametrize("shape", ["best_first", "static"])
def test_incomplete_branches_are_not_moved(folder: Path, drafts: dict[str, Any], shape: TreeShape) -> None:
    """Tokens accepted from a branch right before a move are recomputed by the target."""
    requests = [make_request(kind, **sampling) for kind, sampling in KINDS.items()]
    fields = drafts["noisy" if shape == "best_first" else "layers"]
    proposed, accepted, branched = run(folder, [fields, fields], requests, tree=Tree([3, 2], shape))
    assert 0 < branched < accepted < proposed
