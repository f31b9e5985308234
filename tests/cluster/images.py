"""Images in the nodes' stores, which outlive the cluster."""

from pathlib import Path

from tests.cluster import node as node_module
from tests.cluster.config import ClusterFiles, Node
from tests.cluster.node_files import SOCKET
from tests.cluster.programs import Programs
from tools.shell import output


def import_images(files: ClusterFiles, programs: Programs, node: Node, archives: list[Path]) -> None:
    """Imports new and changed archives into the node's store."""
    for archive in archives:
        marker = files.store(node) / "imported" / archive.name
        # folders of our archives are named by their content; others are identified by size and time
        info = archive.stat()
        content = f"{archive} {info.st_size} {info.st_mtime_ns}"
        if marker.exists() and marker.read_text() == content:
            continue
        _images(files, programs, node, "import", archive)
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.write_text(content)


def tag_image(files: ClusterFiles, programs: Programs, node: Node, image: str, name: str) -> None:
    """Adds a name to an image; the name moves if another image has it."""
    _images(files, programs, node, "tag", "--force", image, name)


def _images(files: ClusterFiles, programs: Programs, node: Node, *words: str | Path) -> None:
    command = (programs.bin / "ctr", "--address", SOCKET, "--namespace", "k8s.io", "images", *words)
    output(*node_module.inside(files, node), *command, env=programs.environment())
