"""What the doctor reads from a machine."""

import msgspec


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU, with measured rates."""

    index: int
    name: str
    """Product."""
    capability: tuple[int, int]
    memory_bytes: int
    copy_bytes_per_s: float
    matmul_flops_per_s: float
    """bf16."""
    throttle: list[str] = []
    """Present reasons for reduced clocks."""
    ecc_uncorrected: int = 0


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """One machine or pod."""

    processors: int
    """In the affinity mask."""
    cpus: float
    """CPU limit of the cgroup, at most `processors`."""
    memory_bytes: int
    """Memory limit of the cgroup, at most the machine's memory."""
    shm_bytes: int
    """Size of /dev/shm; 0 if it does not exist."""
    vectors: list[str]
    """Vector extensions that the kernels use."""
    dtype: str
    """In which CPU ranks compute by default."""
    copy_bytes_per_s: float
    """Of the processors."""
    matmul_flops_per_s: float
    """Of the processors, in `dtype`."""
    torch: str
    cuda: str = ""
    """CUDA version that torch was built for; empty for a CPU build."""
    driver: str = ""
    """Version of NVIDIA's driver; empty without NVML."""
    has_driver_files: bool = False
    """The machine has /dev/nvidiactl."""
    nccl: str = ""
    can_compile: bool = True
    """Triton exists, with the image's compiled kernels or with a C compiler and Python's headers."""
    devices: list[Device] = []
    separated: list[tuple[int, int]] = []
    """Pairs of devices without peer access."""
