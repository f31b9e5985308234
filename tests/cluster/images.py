"""Images into the nodes' stores, which outlive the cluster: an archive is imported once, and again only when it changed."""

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
        command = (programs.bin / "ctr", "--address", SOCKET, "--namespace", "k8s.io", "images", "import", archive)
        output(*node.inside(files, one), *command, env=programs.environment())
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.write_text(content)
