"""Vision towers: config.json of tiny models that read images, whose weights are whole."""

import json
import shutil
import warnings
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

import torch

from bench.fuzz.mutations import INTEGERS, encode_document, mutate_document, places
from bench.fuzz.targets import Defect, Outcome, Target
from phalanx_runtime.checkpoint.vision import read_vision
from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.linear.registry import Kernels
from phalanx_runtime.model.protocol import LoadOptions
from phalanx_runtime.model.vision.tower import load_tower
from phalanx_runtime.rank.profile_run import encode_blank
from tests.runtime.tiny_vision import KINDS, MORE, save_tiny_vision

SMALL = (0, 1, 2, 3, 4, 5, 7, 8, 14, 28, 32, 64, -1, 0.5)


class Towers(Target):
    """Mutated vision_config of each family, and the fields of config.json that a tower reads."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")  # torch warns of tensors without elements
        self._options = LoadOptions(dtype=torch.float32, device=torch.device("cpu"), kernels=Kernels(), positions=512)
        self._folder = folder / "case"
        self._models: list[tuple[Path, dict[str, Any]]] = []
        for kind in (*KINDS, *MORE):
            model = save_tiny_vision(folder / kind, kind)
            self._models.append((model, json.loads((model / "config.json").read_text())))

    def run(self, draw: Random) -> Outcome:
        """Loads one tower as a rank does, and computes an image."""
        model, config = draw.choice(self._models)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir()
        for path in model.iterdir():
            if path.name != "config.json":
                (self._folder / path.name).symlink_to(path)
        (self._folder / "config.json").write_bytes(encode_document(_changed(draw, deepcopy(config))))
        try:
            vision = read_vision(self._folder)
            if vision is None or vision.input.obstacle:
                return "refused"
            tower = load_tower(self._folder, vision, config["text_config"]["hidden_size"], self._options)
            encode_blank(tower)
        except ModelError as error:
            if "config.json" not in str(error) and str(self._folder) not in str(error):
                raise Defect(f"an error without the file: {error}") from error
            str(error).encode()
            return "refused"
        return "accepted"


def _changed(draw: Random, config: dict[str, Any]) -> dict[str, Any]:
    """Changes all but the text's config, which the weights of the text have been compared with."""
    vision: Any = config["vision_config"]
    others = {name: value for name, value in config.items() if name not in ("architectures", "text_config", "vision_config")}
    for _ in range(draw.choice((0, 1, 1, 2, 3))):
        document = vision if draw.random() < 0.8 else others
        numbers = [(node, key) for node, key in places(document) if isinstance(node[key], int | float)]
        if numbers and draw.random() < 0.6:
            node, key = draw.choice(numbers)
            node[key] = draw.choice(SMALL) if draw.random() < 0.6 else draw.choice(INTEGERS)
        elif document is vision:
            vision = mutate_document(draw, vision, 1)
    return {**config, **others, "vision_config": vision}
