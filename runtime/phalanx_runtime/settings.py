"""Flags of `phalanx-runtime`, read once at start and frozen. Named as vLLM names them where they mean the same.

A flag that cannot be used ends the program with code 2, its name and its value.
"""

import argparse
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from phalanx_api import labels
from phalanx_api.speculation import METHODS, TREE_SHAPES, Method, TreeShape
from phalanx_frontend.auth.api_keys import ApiKey, KeysUnreadable, gather_keys
from phalanx_runtime.core.kv.eviction.protocol import POLICY_NAMES, PolicyName
from phalanx_runtime.core.scheduling.policies import POLICY_NAMES as SCHEDULING_POLICIES
from phalanx_runtime.core.scheduling.policies import PolicyName as SchedulingPolicy
from phalanx_runtime.fetch_spec import FetchSettings, add_fetch_flags, fetch_settings
from phalanx_runtime.fit_spec import FitSettings, add_flags, fit_settings
from phalanx_runtime.flag_types import depth, milliseconds, natural, port, positive, seconds, share, widths
from phalanx_runtime.rank_spec import Control, DType, ModelImpl, Quantization


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """What one pod of a group serves, and how."""

    model: str
    """A folder, a .gguf file, org/name where no such path is, or a URI of file, hf, s3, gs or oci."""
    revision: str | None
    """Branch, tag or commit of a model of the hub."""
    served_names: list[str]
    """Names that requests may call the model by; the first is the one shown. Default: the model's last path element."""
    tensor_parallel_size: int
    """Ranks that share each layer."""
    pipeline_parallel_size: int
    """Stages that the layers are cut into, each of as many ranks; as many steps are computed side by side."""
    dtype: DType
    """Of weights and KV cache; auto takes the fastest that the device is good at."""
    quantization: Quantization | None
    """int8 rounds the weights of linears to int8 with a scale per output: half the memory of bf16, other tokens."""
    batch_invariant: bool
    """What a request draws depends on nothing but itself, in bf16 too; slower, and refused where no kernels are fixed so."""
    model_impl: ModelImpl
    """fused is our decoder block, transformers its model around our attention; auto: fused where it knows the architecture."""
    max_model_len: int | None
    """Tokens of prompt and output of one request; default: what the model and the page pool allow."""
    max_num_seqs: int
    """Requests in one step. More use more memory for scores; fewer waste the weights' reading."""
    max_num_queued_reqs: int
    """Requests that may wait. More wait longer; fewer refuse bursts that would have been served."""
    max_num_queued_tokens: int | None
    """The same bound in tokens to be computed, which says how long a wait may be at a known rate; None is no such bound."""
    max_num_batched_tokens: int
    """Tokens in one step. More make prompts faster, and slow down running streams, which wait for the whole step, and the start,
    which runs one such step to measure its memory."""
    page_size: int
    """Tokens in a page of the KV cache."""
    kv_cache_memory_bytes: int | None
    """KV cache of each rank; default: what the device leaves."""
    gpu_memory_utilization: float
    """Share of a GPU's memory that may be used, weights included."""
    enable_prefix_caching: bool
    """Pages of prompts and outputs are kept, and shared by requests that begin alike."""
    prefix_eviction_policy: PolicyName
    """Which kept page goes first when the pool is full."""
    scheduling_policy: SchedulingPolicy
    """In which order requests are served, and the last of which loses its pages when they run out."""
    long_prefill_token_threshold: int
    """Most tokens of one prompt in a step; 0: one longer than a step takes half of it while others have tokens to compute."""
    itl_target_ms: float | None
    """How long a step with running streams should take at most; prompts get the tokens that this leaves. Default: no target."""
    speculative_method: Method
    """Who proposes tokens that a step then verifies, where a request does not say. It changes times, never tokens."""
    speculative_tokens: int
    """Most tokens that are proposed for a request in a step."""
    speculative_tree: list[int]
    """Tokens proposed for the first place, then behind each of those, and so on; behind deeper ones one. Default: chains."""
    speculative_tree_shape: TreeShape
    """best_first: drafts choose which branches there are, by their shares; static: chosen before, by what was accepted."""
    speculative_control: Control
    """adaptive: as many as pay, none under load; fixed: as many as there are, for measurements."""
    speculative_draft_model: str | None
    """The model that drafts for this one, written as MODEL is; it has the same tokens. Its pages take part of the KV cache."""
    speculative_exit: str | None
    """The map by which the first layers draft, made by `fit-exit`: a file, or a URI as MODEL's. Without it they agree seldom."""
    speculative_ratio: float | None
    """Share of the layers that draft; default: what the exit was fitted for, else 0.4. More agree more often, and take longer."""
    download_dir: Path
    """Where models are downloaded and converted to."""
    cached_only: bool
    """Only models that are there already are served, as they were when last fetched: the folder may be read-only."""
    host: str
    port: int
    nnodes: int
    """Pods of the group."""
    node_rank: int
    """This pod's index; pod 0 leads."""
    master_addr: str
    """Where the leader is reached by the other pods."""
    master_port: int
    """Port where the pods meet; rank r listens on the r + 1st port after it."""
    token: str | None
    """The service's token, which routers, pods and ranks prove; None on one machine alone, which then has no link."""
    group_key: str
    """What the pods of the group alone have beside the token, if the operator gave it."""
    group: str
    revision_hash: str
    """The operator's names of the group and its revision, told to routers."""
    hf_token: str | None
    api_keys: tuple[ApiKey, ...]
    """Who may use the door; none: anyone."""
    shutdown_timeout: float
    """Seconds that open streams may go on after SIGTERM. More than the pod's grace period cuts them without a word."""

    @property
    def world_size(self) -> int:
        """Ranks of the group, over all its pods."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def local_world_size(self) -> int:
        """Ranks of this pod."""
        return self.world_size // self.nnodes


@dataclass(frozen=True, slots=True)
class ConvertSettings:
    """A GGUF file, and the folder that is made of it."""

    gguf: Path
    folder: Path


def read_settings(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    parser_class: type[argparse.ArgumentParser] = argparse.ArgumentParser,
) -> ServeSettings | ConvertSettings | FetchSettings | FitSettings:
    """What the flags say. When one cannot be used, the parser's `error`: it exits with code 2, the name and the value."""
    parser = make_parser(parser_class)
    flags = parser.parse_args(arguments)
    if flags.command == "convert":
        return ConvertSettings(flags.gguf, flags.folder)
    folder, hf_token = _default_download_dir(environment), environment.get("HF_TOKEN") or None
    if flags.command == "fetch":
        return fetch_settings(flags, folder, hf_token)
    if flags.command == "fit-exit":
        return fit_settings(flags, folder, hf_token)
    _check(parser, flags)
    return ServeSettings(
        model=flags.model,
        revision=flags.revision,
        served_names=flags.served_model_name or [_last_element(flags.model)],
        tensor_parallel_size=flags.tensor_parallel_size,
        pipeline_parallel_size=flags.pipeline_parallel_size,
        dtype=flags.dtype,
        quantization=flags.quantization,
        batch_invariant=flags.batch_invariant,
        model_impl=flags.model_impl,
        max_model_len=flags.max_model_len,
        max_num_seqs=flags.max_num_seqs,
        max_num_queued_reqs=flags.max_num_queued_reqs,
        max_num_queued_tokens=flags.max_num_queued_tokens,
        max_num_batched_tokens=flags.max_num_batched_tokens,
        page_size=flags.page_size,
        kv_cache_memory_bytes=flags.kv_cache_memory_bytes,
        gpu_memory_utilization=flags.gpu_memory_utilization,
        enable_prefix_caching=flags.enable_prefix_caching,
        prefix_eviction_policy=flags.prefix_eviction_policy,
        scheduling_policy=flags.scheduling_policy,
        long_prefill_token_threshold=flags.long_prefill_token_threshold,
        itl_target_ms=flags.itl_target_ms,
        speculative_method=flags.speculative_method,
        speculative_tokens=flags.speculative_tokens,
        speculative_tree=flags.speculative_tree,
        speculative_tree_shape=flags.speculative_tree_shape,
        speculative_control=flags.speculative_control,
        speculative_draft_model=flags.speculative_draft_model,
        speculative_exit=flags.speculative_exit,
        speculative_ratio=flags.speculative_ratio,
        download_dir=flags.download_dir or folder,
        cached_only=flags.cached_only,
        host=flags.host,
        port=flags.port,
        nnodes=flags.nnodes,
        node_rank=flags.node_rank,
        master_addr=flags.master_addr,
        master_port=flags.master_port,
        token=_read_token(parser, flags.token_file),
        group=environment.get(labels.ENV_GROUP) or socket.gethostname(),
        group_key=environment.get(labels.ENV_GROUP_KEY, ""),
        revision_hash=environment.get(labels.ENV_REVISION, ""),
        hf_token=hf_token,
        api_keys=_read_keys(parser, flags.api_key, flags.api_keys_file),
        shutdown_timeout=flags.shutdown_timeout,
    )


def _add_speculation(serve: argparse.ArgumentParser) -> None:
    add = serve.add_argument
    add("--speculative-method", choices=METHODS, default="none", help="who proposes tokens for a step to verify")
    add("--speculative-tokens", type=depth, default=4, metavar="N", help="most tokens proposed for a request in a step")
    add("--speculative-tree", type=widths, default=[], metavar="N,N", help="tokens for one place, by level; default: chains")
    add("--speculative-tree-shape", choices=TREE_SHAPES, default="best_first", help="who chooses the branches of a tree")
    add("--speculative-control", choices=["adaptive", "fixed"], default="adaptive", help="propose what pays, or all there is")
    add("--speculative-draft-model", metavar="MODEL", help="the model that drafts: folder, .gguf file, org/name, or a URI")
    add("--speculative-exit", metavar="FILE", help="what fit-exit made, for drafts by the first layers: a file, or a URI")
    add("--speculative-ratio", type=share, metavar="SHARE", help="of the layers, which draft; default: as fitted, else 0.4")


def make_parser(parser_class: type[argparse.ArgumentParser] = argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The command line."""
    parser = parser_class("phalanx-runtime", description="Serve a language model from this machine or pod.")
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="serve a model", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = serve.add_argument
    add("model", metavar="MODEL", help="folder, .gguf file, org/name, or a URI of file, hf, s3, gs or oci (docs/models.md)")
    add("--revision", help="branch, tag or commit of a model of the hub")
    add("--served-model-name", nargs="+", metavar="NAME", help="names of the model in requests; default: its last path element")
    add("--tensor-parallel-size", "-tp", type=positive, default=1, metavar="N", help="ranks that share each layer")
    add("--pipeline-parallel-size", "-pp", type=positive, default=1, metavar="N", help="stages that the layers are cut into")
    add("--dtype", choices=["auto", "float32", "bfloat16", "float64"], default="auto", help="of weights and KV cache")
    add("--quantization", "-q", choices=["int8"], help="round the weights of linears; default: as they are")
    add("--batch-invariant", action="store_true", help="compute each token the same way whatever else is in a step")
    add("--model-impl", choices=["auto", "fused", "transformers"], default="auto", help="which code computes the model")
    add("--max-model-len", type=positive, metavar="N", help="tokens of prompt and output of one request")
    add("--max-num-seqs", type=positive, default=64, metavar="N", help="requests in one step")
    add("--max-num-queued-reqs", type=positive, default=1024, metavar="N", help="requests that may wait; more are told 429")
    add("--max-num-queued-tokens", type=positive, metavar="N", help="tokens to compute that may wait; default: no such bound")
    add("--max-num-batched-tokens", type=positive, default=512, metavar="N", help="tokens in one step")
    add("--page-size", type=positive, default=16, metavar="N", help="tokens in a page of the KV cache")
    add("--kv-cache-memory-bytes", type=positive, metavar="B", help="KV cache of each rank; default: what the device leaves")
    add("--gpu-memory-utilization", type=share, default=0.9, metavar="SHARE", help="of a GPU's memory")
    add("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True, help="share pages of equal beginnings")
    add("--prefix-eviction-policy", choices=POLICY_NAMES, default="adaptive", help="which cached page goes first")
    add("--scheduling-policy", choices=SCHEDULING_POLICIES, default="fcfs", help="in which order requests are served")
    add("--long-prefill-token-threshold", type=natural, default=0, metavar="N", help="most tokens of one prompt in a step")
    add("--itl-target-ms", type=milliseconds, metavar="MS", help="how long a step with running streams should take at most")
    _add_speculation(serve)
    add("--download-dir", type=Path, metavar="DIR", help="where models are downloaded and converted to")
    add("--cached-only", action="store_true", help="serve what is there already; the folder may be read-only")
    add("--host", default="127.0.0.1", help="address of the HTTP server")
    add("--port", type=port, default=labels.HTTP_PORT, help="port of the HTTP server; 0 takes any")
    add("--nnodes", type=positive, default=1, metavar="N", help="pods of the group")
    add("--node-rank", type=natural, default=0, metavar="I", help="index of this pod; 0 leads")
    add("--master-addr", default="127.0.0.1", metavar="HOST", help="where the other pods reach the leader")
    add(
        "--master-port",
        type=port,
        default=labels.RENDEZVOUS_PORT,
        metavar="PORT",
        help="where pods meet; ranks take the next ones",
    )
    add("--token-file", type=Path, metavar="FILE", help="token of the service, proved by routers, pods and ranks")
    add("--api-key", nargs="+", action="extend", default=[], metavar="KEY", help="who brings one of these may use the door")
    add("--api-keys-file", type=Path, metavar="FILE", help="keys with names: JSON, or lines of `name key [priority]`")
    add("--shutdown-timeout", type=seconds, default=20.0, metavar="S", help="how long open streams may go on after SIGTERM")
    convert = commands.add_parser("convert", help="make a folder of safetensors and tokenizer from a GGUF file")
    convert.add_argument("gguf", type=Path, metavar="GGUF")
    convert.add_argument("folder", type=Path, metavar="DIR")
    fetch = commands.add_parser("fetch", help="download a model, for caches that groups only read")
    add_fetch_flags(fetch.add_argument)
    fit = commands.add_parser("fit-exit", help="fit the exit by which a model's first layers draft for it")
    add_flags(fit.add_argument, share, positive, seconds)
    return parser


def _check(parser: argparse.ArgumentParser, flags: argparse.Namespace) -> None:
    """What no flag can be judged on alone."""
    stages = flags.pipeline_parallel_size
    if flags.tensor_parallel_size * stages % flags.nnodes:
        times = f" times --pipeline-parallel-size {stages}" if stages > 1 else ""
        size = f"--tensor-parallel-size {flags.tensor_parallel_size}{times}"
        parser.error(f"{size} cannot be split evenly over --nnodes {flags.nnodes}")
    if flags.node_rank >= flags.nnodes:
        parser.error(f"--node-rank {flags.node_rank} must be below --nnodes {flags.nnodes}")
    if flags.nnodes > 1 and flags.token_file is None:
        parser.error(f"--nnodes {flags.nnodes} needs --token-file: pods let one another in by the token")
    if flags.max_num_batched_tokens < flags.max_num_seqs:
        parser.error(
            f"--max-num-batched-tokens {flags.max_num_batched_tokens} must be at least --max-num-seqs {flags.max_num_seqs}, "
            "or a step could not hold one token of each request"
        )
    _check_speculation(parser, flags)
    path = _local_path(flags.model)
    if path is not None and not path.exists():
        parser.error(f"MODEL {flags.model}: no such file or folder")


def _check_speculation(parser: argparse.ArgumentParser, flags: argparse.Namespace) -> None:
    """Who drafts needs what it drafts with, and what is given must be used."""
    method = flags.speculative_method
    if method == "draft" and flags.speculative_draft_model is None:
        parser.error("--speculative-method draft needs --speculative-draft-model")
    given = {
        "--speculative-draft-model": (flags.speculative_draft_model, "draft"),
        "--speculative-exit": (flags.speculative_exit, "self_draft"),
        "--speculative-ratio": (flags.speculative_ratio, "self_draft"),
    }
    for flag, (value, user) in given.items():
        if value is not None and method != user:
            parser.error(f"{flag} {value} is used by --speculative-method {user}, not by {method}")


def _local_path(model: str) -> Path | None:
    """The path that the model is said to be at, or None when it may be a name at the hub."""
    if model.startswith("file://"):
        return Path(unquote(urlsplit(model).path))
    if model.startswith(("/", ".", "~")) or (model.endswith(".gguf") and "://" not in model):
        return Path(model).expanduser()
    return None


def _last_element(model: str) -> str:
    """The name of a folder, file or repository, without what is before and without .gguf."""
    path = _local_path(model)
    name = model if path is None else str(path.resolve())
    return name.rstrip("/").rsplit("/", 1)[-1].removesuffix(".gguf")


def _default_download_dir(environment: Mapping[str, str]) -> Path:
    """The pod's cache volume where it is writable, else the user's cache."""
    if os.access(labels.CACHE_DIR, os.W_OK):
        return Path(labels.CACHE_DIR)
    base = environment.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "phalanx"


def _read_token(parser: argparse.ArgumentParser, file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        token = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        parser.error(f"--token-file {file}: {error}")
    if not token:
        parser.error(f"--token-file {file}: the file is empty")
    return token


def _read_keys(parser: argparse.ArgumentParser, given: Sequence[str], file: Path | None) -> tuple[ApiKey, ...]:
    try:
        keys = tuple(gather_keys(given, file))
    except KeysUnreadable as error:
        parser.error(f"--api-key, --api-keys-file: {error}")
    bounded = [key.name for key in keys if key.quota is not None]
    if bounded:
        parser.error(f"--api-keys-file: {bounded[0]} has a quota, which only a router keeps")
    return keys
