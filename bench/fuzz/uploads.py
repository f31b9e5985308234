"""Files that clients send: images in requests, and the input of a batch."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from random import Random

from PIL import Image

from bench.fuzz.mutations import encode_document, mutate_bytes, mutate_document
from bench.fuzz.targets import Defect, Outcome, Target
from phalanx_frontend.images.decoding import decode
from phalanx_frontend.images.errors import ImageRefused
from phalanx_router.batches.lines import check_lines, read_lines
from phalanx_router.batches.records import Problem
from tests.frontend.images.pictures import TAKEN, TILED, colour, file_of

MAX_PIXELS = 100_000
ENDPOINT = "/v1/chat/completions"


class Images(Target):
    """Mutated PNG, JPEG, WebP and GIF files, some with a turned EXIF, a palette or a profile."""

    def __init__(self, folder: Path) -> None:
        small, grey = colour(200), Image.new("L", (20, 7), 9)
        exif = Image.Exif()
        exif[0x0112] = 6
        self._files = [file_of(small), file_of(grey), file_of(small.convert("P")), file_of(small, "GIF"), file_of(small, "WEBP")]
        self._files += [file_of(small, "JPEG", exif=exif), file_of(small, "JPEG", progressive=True, icc_profile=bytes(200))]
        self._files += [file_of(small, "GIF", save_all=True, append_images=[small, small]), file_of(small, "WEBP", lossless=True)]

    def run(self, draw: Random) -> Outcome:
        """Decodes one file."""
        content = draw.choice(self._files)
        for _ in range(draw.choice((0, 1, 1, 2, 4))):
            content = mutate_bytes(draw, content)
        try:
            picture = decode(content, draw.choice((TAKEN, TILED)), MAX_PIXELS, "messages")
        except ImageRefused as error:
            if "messages" not in str(error):
                raise Defect(f"an error without the parameter: {error}") from error
            return "refused"
        if len(picture.pixels) != 3 * picture.cut.num_tiles * TAKEN.height * TAKEN.width:
            raise Defect(f"{len(picture.pixels)} bytes of pixels")
        return "accepted"


class BatchFiles(Target):
    """Mutated lines of a batch."""

    def __init__(self, folder: Path) -> None:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "once"}], "max_tokens": 2}
        self._lines = [{"custom_id": str(number), "method": "POST", "url": ENDPOINT, "body": body} for number in range(3)]

    def run(self, draw: Random) -> Outcome:
        """Checks and reads one file."""
        lines = json.loads(json.dumps(self._lines))
        mutated = [mutate_document(draw, line, 1) if draw.random() < 0.4 else line for line in lines]
        content = draw.choice((b"\n", b"\r\n", b"\n\n", b" \n")).join(encode_document(line) for line in mutated)
        if draw.random() < 0.3:
            content = mutate_bytes(draw, content)
        rows = list(io.BytesIO(content))
        count, problems = check_lines(rows, ENDPOINT)
        found = list(read_lines(rows, ENDPOINT))
        if found and bool(problems) != any(isinstance(line, Problem) for line in found):
            raise Defect(f"the check finds {len(problems)} problems in {len(rows)} lines, the reader others")
        return "refused" if problems or not count else "accepted"


LOADERS: dict[str, Callable[[Path], Target]] = {"image": Images, "batch": BatchFiles}
