"""Shape of a group: its ranks and their pods."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GroupShape:
    """Ranks of a group, in pods of equal size. Raises ValueError if `gpus_per_pod` does not divide them."""

    tensor: int
    gpus_per_pod: int = 0  # 0: all ranks in one pod
    pipeline: int = 1

    def __post_init__(self) -> None:
        if min(self.tensor, self.pipeline) < 1 or self.gpus_per_pod < 0:
            raise ValueError("tensor and pipeline are at least 1, gpusPerPod is at least 0")
        if self.ranks % self.ranks_per_pod:
            raise ValueError(f"gpusPerPod {self.gpus_per_pod} does not divide the {self.ranks} ranks of a group")

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.tensor * self.pipeline

    @property
    def ranks_per_pod(self) -> int:
        """Ranks, and so devices, in each pod."""
        return self.gpus_per_pod or self.ranks

    @property
    def pods(self) -> int:
        """Number of pods."""
        return self.ranks // self.ranks_per_pod

    def pod_of(self, rank: int) -> int:
        """Returns the pod of a rank; ranks fill pods in order. Raises ValueError for an unknown rank."""
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank {rank} is not one of the group's {self.ranks} ranks")
        return rank // self.ranks_per_pod

    def ranks_of(self, pod: int) -> range:
        """Returns the ranks of a pod. Raises ValueError for an unknown pod."""
        if not 0 <= pod < self.pods:
            raise ValueError(f"pod {pod} is not one of the group's {self.pods} pods")
        return range(pod * self.ranks_per_pod, (pod + 1) * self.ranks_per_pod)
