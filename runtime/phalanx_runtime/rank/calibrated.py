"""Calibrated pages of a rank: `--kv-cache-calibration`."""

from dataclasses import replace
from pathlib import Path

import torch

from phalanx_runtime.checkpoint.folder import CALIBRATION_SUFFIX
from phalanx_runtime.checkpoint.model_hash import weights_hash
from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.attention.calibration import ModelPart, calibration_hash, read_calibration
from phalanx_runtime.model.decoder.decoder import Decoder
from phalanx_runtime.model.partition import Stage
from phalanx_runtime.model.protocol import Model
from phalanx_runtime.rank.step.pipeline import Pipeline
from phalanx_runtime.rank_spec import RankSpec


def use_calibration(spec: RankSpec, model: Model, pipeline: Pipeline, device: torch.device) -> str:
    """Makes the model's pages calibrated, if the spec says so. Returns a hash of the calibration, empty without one.

    Raises ModelError if it does not fit the model.
    """
    if spec.engine.kv_cache_calibration is None:
        return ""
    if spec.engine.kv_cache_dtype == "auto":
        raise ModelError("--kv-cache-calibration needs --kv-cache-dtype fp8, int8 or int4: other pages are not rounded")
    folder = Path(spec.model_dir)
    path = folder / spec.engine.kv_cache_calibration  # an absolute path stays as it is
    if not path.is_file():
        hint = f"; of a downloaded model only files *{CALIBRATION_SUFFIX} next to config.json are there"
        name = Path(spec.engine.kv_cache_calibration)
        raise ModelError(f"calibration {path} cannot be read: no such file{'' if name.is_absolute() else hint}")
    if not isinstance(model, Decoder):
        raise ModelError("--kv-cache-calibration needs a model of the fused decoder")
    if model.kv.is_latent:
        raise ModelError("--kv-cache-calibration: pages of latents are not calibrated")
    card, roundings = read_calibration(path, part_of(model, pipeline.stage))
    own_hash = weights_hash(folder)
    if card.model_hash != own_hash:
        raise ModelError(
            f"calibration {path} was made for the model {card.model_hash[:16]}, and this one is {own_hash[:16]}: make it again"
        )
    digest = calibration_hash(path)
    if len({number for (number,) in pipeline.world.all_gather_integers([int(digest, 16) >> 1])}) > 1:
        raise ModelError(f"calibration {path} differs between the ranks of the group")
    model.kv = replace(model.kv, roundings=tuple(rounding.to(device) for rounding in roundings))
    return digest


def part_of(model: Decoder, stage: Stage) -> ModelPart:
    """Returns the rank's layers and heads."""
    config, heads = model.config, model.shard.kv_heads
    layers = stage.layers(config.num_layers)
    return ModelPart(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        layers=range(layers.start, layers.stop),
        kv_heads=range(heads.start, heads.stop),
    )
