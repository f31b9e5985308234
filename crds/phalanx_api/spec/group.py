"""The shape of a group: how many pods it has and which ranks live in which pod. At rest: tensor 1, one pod, one rank."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GroupShape:
    """Ranks of a group and their places. `gpus_per_pod` 0 puts all ranks in one pod.

    Raises: ValueError when the ranks cannot be shared out evenly; the CRD refuses such a spec first.
    """

    tensor: int
    gpus_per_pod: int = 0
    pipeline: int = 1

    def __post_init__(self) -> None:
        if min(self.tensor, self.pipeline) < 1 or self.gpus_per_pod < 0:
            raise ValueError("tensor and pipeline are at least 1, gpusPerPod is at least 0")
        if self.ranks % self.ranks_per_pod:
            raise ValueError(f"gpusPerPod {self.gpus_per_pod} does not divide the {self.ranks} ranks of a group")

    @property
    def ranks(self) -> int:
        """How many ranks the group has."""
        return self.tensor * self.pipeline

    @property
    def ranks_per_pod(self) -> int:
        """How many ranks, and so devices, each pod has."""
        return self.gpus_per_pod or self.ranks

    @property
    def pods(self) -> int:
        """How many pods the group has."""
        return self.ranks // self.ranks_per_pod

    def pod_of(self, rank: int) -> int:
        """Index of the pod where this rank lives: ranks fill one pod after the other.

        Raises: ValueError for a rank that the group does not have.
        """
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank {rank} of a group of {self.ranks} ranks")
        return rank // self.ranks_per_pod

    def ranks_of(self, pod: int) -> range:
        """The ranks of a pod. Raises: ValueError for a pod that the group does not have."""
        if not 0 <= pod < self.pods:
            raise ValueError(f"pod {pod} of a group of {self.pods} pods")
        return range(pod * self.ranks_per_pod, (pod + 1) * self.ranks_per_pod)
