"""Requests with drafts move: pages take the draft's layers along to the same draft, and go on without them elsewhere. Float64."""

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
from tests.runtime.moving_requests import KINDS, make_request, moved_to_and_fro, undisturbed
from tests.runtime.ranks import Build

MODES: tuple[moves.MoveMode, ...] = ("precopy", "stop", "precopy")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("moves") / "model")


@pytest.fixture(scope="module")
def ways(folder: Path) -> dict[str, dict[str, Any]]:
    """What the ranks of a group are told."""
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
    """Tokens proposed and accepted in these groups, and of these the ones that were not the first of their place."""
    told = [group.loop.speculation for group in groups if group.loop is not None]
    return (
        sum(sum(one.proposed) for one in told),
        sum(sum(one.accepted) for one in told),
        sum(one.branched for one in told),
    )


def run(
    folder: Path, ways: Sequence[dict[str, Any]], requests: list[wire.Request], pods: int = 1, tree: Tree = CHAIN
) -> tuple[int, int, int]:
    """Moves all requests to and fro between two groups, and compares with the undisturbed; tokens proposed and accepted, and of
    these the ones that were not the first of their place."""
    with ExitStack() as stack:
        groups = []
        for way in ways:
            method = way.get("speculative_method", "none")
            drafts = frozenset({method} - {"none"})
            rules = replace(
                RULES,
                speculating=SpeculationConfig(
                    method=method, num_tokens=6 if tree.widths else 3, is_adaptive=False, drafts=drafts, tree=tree
                ),
            )
            build = Build(torch.float64, num_pages=120, speculative=way)
            groups.append(stack.enter_context(running_group(folder, [pods], build, rules=rules)))
        router = Mover([group.channel for group in groups])
        plain = undisturbed(router, [msgspec.structs.replace(one, speculation=Speculation("none")) for one in requests])
        assert moved_to_and_fro(router, requests, plain, MODES) > 0
        return counts(groups)


@pytest.mark.parametrize("pods", [1, 2], ids=["one", "tp2"])
def test_the_pages_of_the_same_draft_come_along(folder: Path, ways: dict[str, Any], pods: int) -> None:
    """The draft is the target itself: behind a move it is right as before, which it is only if its own pages came too."""
    requests = [make_request(kind, **KINDS[kind]) for kind in ("greedy", "seeded")]
    proposed, accepted, _ = run(folder, [ways["twin"], ways["twin"]], requests, pods)
    assert proposed == accepted > 30


@pytest.mark.parametrize("other", ["noisy", "nothing", "layers"])
def test_groups_of_other_drafts_take_each_others_requests(folder: Path, ways: dict[str, Any], other: str) -> None:
    kinds = ("greedy", "seeded", "schema", "penalised")
    requests = [make_request(kind, **(KINDS[kind] | {"seed": 8})) for kind in kinds]  # no object is complete before its 40 tokens
    proposed, accepted, _ = run(folder, [ways["noisy" if other == "layers" else "twin"], ways[other]], requests)
    assert 0 < accepted <= proposed
    assert (accepted == proposed) == (other == "nothing"), "the twin alone drafts, and is right before a move and after it"


def test_self_drafts_move_as_their_pages_do(folder: Path, ways: dict[str, Any]) -> None:
    requests = [make_request(kind, **sampling) for kind, sampling in KINDS.items()]
    proposed, accepted, _ = run(folder, [ways["layers"], ways["layers"]], requests)
    assert 0 < accepted < proposed


@pytest.mark.parametrize("shape", ["best_first", "static"])
def test_incomplete_branches_are_not_moved(folder: Path, ways: dict[str, Any], shape: TreeShape) -> None:
    """What was accepted from a branch just before a move is computed again by the other group."""
    requests = [make_request(kind, **sampling) for kind, sampling in KINDS.items()]
    way = ways["noisy" if shape == "best_first" else "layers"]
    proposed, accepted, branched = run(folder, [way, way], requests, tree=Tree([3, 2], shape))
    assert 0 < branched < accepted < proposed
