"""The simulation of other roundings on a tiny model with random weights."""

from pathlib import Path

import pytest
import torch

from bench.kv_cache import quality
from bench.kv_cache.rounding import SCHEMES, Difference, KeyMoments, Scheme, key_rounding, measure, report, rounding_of, unrotated
from phalanx_runtime.model.attention.page_format import FORMATS, encode
from phalanx_runtime.model.rope import Rope, RopeTable, rotate
from tests.runtime.tiny import save_tiny

TEXT = "some words of a text " * 40


def divergence(difference: Difference) -> float:
    return 1000 * float(torch.cat(difference.divergences).mean())


def test_simulated_pages_equal_compressed_ones(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model")
    texts = quality.pieces(folder, TEXT, 64, 3)
    found = measure(folder, texts[:2], texts[2:], {name: SCHEMES[name] for name in ("fp8", "int4")})
    compressed = quality.measure(folder, TEXT, {"length": 64, "texts": 2, "parts": 1})
    for page in compressed:
        if page.kv_cache_dtype in found:
            assert divergence(found[page.kv_cache_dtype]) == pytest.approx(page.kl_millinats[0], rel=0.02)


def test_each_scheme_is_reported(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model")
    texts = quality.pieces(folder, TEXT, 64, 2)
    found = measure(folder, texts[:1], texts[1:], SCHEMES)
    assert report(found).count("\n") == 1 + len(SCHEMES)
    assert divergence(found["int4, keys only"]) < divergence(found["int4"]), "values were exact"
    assert len({divergence(difference) for difference in found.values()}) == len(SCHEMES), "each changes something"


def test_keys_are_rounded_before_the_rotary_step() -> None:
    x, positions = torch.randn(9, 2, 64, generator=torch.Generator().manual_seed(0)), torch.arange(9)
    angles = RopeTable(Rope(theta=100.0), 64, 9, torch.float32, torch.device("cpu")).at(positions)
    seen: list[torch.Tensor] = []

    def keep(keys: torch.Tensor) -> torch.Tensor:
        seen.append(keys)
        return keys

    assert torch.allclose(unrotated(rotate(x, angles), angles, keep), rotate(x, angles), atol=1e-5)
    assert torch.allclose(seen[0], x, atol=1e-5)


@pytest.mark.parametrize("name", ["fp8", "int4"])
def test_dimensions_are_rounded_as_pages_round_heads(name: str) -> None:
    x, format = torch.randn(7, 2, 64, generator=torch.Generator().manual_seed(0)), FORMATS[name]
    columns = torch.cat([rounding_of(x, format)(x[..., i : i + 1]) for i in range(64)], -1)
    assert torch.equal(columns, format.decode(*encode(format, x), torch.float32))


@pytest.mark.parametrize("name", ["fp8", "int4"])
def test_feedback_and_shift_lower_errors_of_logits(name: str) -> None:
    rng, dim = torch.Generator().manual_seed(0), 64
    mix = torch.randn(dim, dim, generator=rng)
    q = (torch.randn(500, dim, generator=rng) * torch.logspace(1, -2, dim)) @ mix
    k = torch.randn(500, 1, dim, generator=rng) + 3 * torch.randn(dim, generator=rng)
    moments = KeyMoments()
    moments.add(q[:, None], k, k, torch.zeros(500, dtype=torch.bool))
    moments.first, moments.first_count = k.mean(0), 1

    def error(scheme: Scheme) -> float:
        rounded = key_rounding(moments, scheme).apply(k, FORMATS[name])
        return float((q @ (rounded - k)[:, 0].T).square().mean())

    plain, shift, feedback = Scheme(name), Scheme(name, shift=True), Scheme(name, shift=True, feedback=True)
    assert error(feedback) < 0.5 * error(shift) < 0.25 * error(plain)
