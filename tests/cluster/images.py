"""Images in the nodes' stores, which outlive the cluster: an archive is imported once, and again only when it changed."""

from pathlib import Path

from tests.cluster import node
from tests.cluster.config import ClusterFiles, Node
from tests.cluster.node_files import SOCKET
from tests.cluster.programs import Programs
from tools.shell import output


def import_images(files: ClusterFiles, programs: Programs, one: Node, archives: list[Path]) -> None:
    """Nothing; every image of the archives is in the node's store. An archive that is there already costs nothing."""
    for archive in archives:
        marker = files.store(one) / "imported" / archive.name
        # Archives lie in folders named by their content; others are known by size and time.
        now = archive.stat()
        content = f"{archive} {now.st_size} {now.st_mtime_ns}"
        if marker.exists() and marker.read_text() == content:
            continue
        _images(files, programs, one, "import", archive)
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.write_text(content)


def tag_image(files: ClusterFiles, programs: Programs, one: Node, image: str, name: str) -> None:
    """Nothing; an image of the node's store has another name too, and what had that name before has it no more."""
    _images(files, programs, one, "tag", "--force", image, name)


def _images(files: ClusterFiles, programs: Programs, one: Node, *words: str | Path) -> None:
    command = (programs.bin / "ctr", "--address", SOCKET, "--namespace", "k8s.io", "images", *words)
    output(*node.inside(files, one), *command, env=programs.environment())
