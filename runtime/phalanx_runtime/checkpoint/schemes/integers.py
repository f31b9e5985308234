"""Integer kinds of `quantization_config`: AWQ, GPTQ, LLM.int8, and `pack-quantized` and `int-quantized` of compressed-tensors.

Names of fields and values are those of AutoAWQ, GPTQModel and compressed-tensors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from phalanx_runtime.errors import ModelError

Json = Mapping[str, Any]
Layout = Literal["pack-quantized", "int-quantized", "awq", "gptq", "bitsandbytes"]
_BITS = {"pack-quantized": (4, 8), "int-quantized": (8,)}
_OTHER_LAYOUTS = ("gemv", "marlin", "llm-awq", "bitblas")
_ORDERS = {None: False, False: False, "weight": False, "static": False, True: True, "group": True, "dynamic": True}
"""Whether an `actorder` of compressed-tensors stores the groups of the inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IntScheme:
    """Weights in integer codes: (code - zero point) * scale."""

    layout: Layout
    bits: int
    group: int | None
    """Inputs with a common scale; None: one scale per output or tensor."""
    has_zeros: bool
    """Whether zero points are stored; else the middle code is zero."""
    zero_shift: int = 0
    """What is added to stored zero points."""
    has_order: bool = False
    """Whether the group of each input must be stored."""
    is_symmetric: bool = False
    """Whether the checkpoint declares that all stored zero points are the middle code."""
    rounds_inputs: bool = False
    """Whether it is made for activations in int8."""
    name: str
    """For logs: `AWQ, 4 bits in groups of 128 inputs`."""

    @property
    def keeps_zeros(self) -> bool:
        """Whether zero points are kept in memory: those that are all the middle code are not."""
        return self.has_zeros and not self.is_symmetric

    @property
    def has_gpu_format(self) -> bool:
        """Whether GPUs multiply the codes as they are: in groups of a multiple of 16 inputs, 8 bits without zero points.

        Scales of 4 bits must be numbers of float16 or bfloat16. In an activation order a rank must have whole groups.
        """
        has_groups = self.group is None or self.group % 16 == 0
        return has_groups and (self.bits == 4 or not self.keeps_zeros)

    @property
    def bytes_per_weight(self) -> float:
        """Bytes of a packed weight in memory, with its share of a scale in 16 bits and a zero point in 8."""
        return self.bits / 8 + (0 if self.group is None else (3 if self.keeps_zeros else 2) / self.group)


def parse_awq(config: Json) -> IntScheme:
    """Returns the scheme of AutoAWQ's gemm version. Raises ModelError for others."""
    version, bits = str(config.get("version", "gemm")).lower(), config.get("bits", config.get("w_bit"))
    if version != "gemm":
        raise ModelError(f"quantization_config: awq version {version} is not supported: use gemm")
    _check_layout("awq", config, ("gemm",))
    if bits != 4:
        raise ModelError(f"quantization_config: awq of {bits!r} bits is not supported: use 4")
    if config.get("zero_point", True) is not True:
        raise ModelError("quantization_config: awq without zero_point is not supported")
    group = _group_size(config.get("group_size", config.get("q_group_size")))
    return IntScheme(layout="awq", bits=4, group=group, has_zeros=True, name=f"AWQ, 4 bits {_groups_name(group)}")


def parse_gptq(config: Json) -> IntScheme:
    """Returns the scheme of checkpoint formats gptq, which stores zero points less 1, and gptq_v2. Raises ModelError."""
    bits, form = config.get("bits"), config.get("checkpoint_format") or config.get("format") or "gptq"
    if bits not in (4, 8) or isinstance(bits, float):
        raise ModelError(f"quantization_config: gptq of {bits!r} bits is not supported: use 4 or 8")
    if form not in ("gptq", "gptq_v2") or config.get("is_marlin_format"):
        raise ModelError(f"quantization_config: gptq in checkpoint_format {form} is not supported: use gptq or gptq_v2")
    _check_layout("gptq", config, (form,))
    _check_dynamic(config.get("dynamic"))
    group, has_order = _group_size(config.get("group_size")), bool(config.get("desc_act", False))
    return IntScheme(
        layout="gptq",
        bits=bits,
        group=group,
        has_zeros=True,
        zero_shift=1 if form == "gptq" else 0,
        has_order=has_order,
        is_symmetric=config.get("sym", True) is True,
        name=f"GPTQ, {bits} bits {_groups_name(group)}{', by activation order' if has_order else ''}",
    )


def parse_compressed_ints(form: Literal["pack-quantized", "int-quantized"], groups: Sequence[Json]) -> IntScheme:
    """Returns the scheme of all config_groups, which have weights. Raises ModelError for an unsupported one, or for several."""
    schemes = {_compressed_part(form, group["weights"], group.get("input_activations")) for group in groups}
    if len(schemes) > 1:
        names = sorted(scheme.name for scheme in schemes)
        raise ModelError(f"quantization_config: config_groups of several schemes are not supported: {'; '.join(names)}")
    return schemes.pop()


def _compressed_part(form: Literal["pack-quantized", "int-quantized"], part: Json, inputs: Any) -> IntScheme:
    strategy, kind, bits = part.get("strategy"), part.get("type", "int"), part.get("num_bits")
    strategies = ("tensor", "channel", "group") if form == "pack-quantized" else ("tensor", "channel")
    if kind != "int" or bits not in _BITS[form] or isinstance(bits, float) or strategy not in strategies:
        raise ModelError(
            f"quantization_config: compressed-tensors weights of {bits} bits ({kind}) by {strategy} are not supported in {form}: "
            f"use {' or '.join(map(str, _BITS[form]))} bits (int) by {', '.join(strategies[:-1])} or {strategies[-1]}"
        )
    order = part.get("actorder")
    if not isinstance(order, str | bool | None) or order not in _ORDERS:
        raise ModelError(f"quantization_config: actorder {order!r} is not supported")
    group = _group_size(part.get("group_size")) if strategy == "group" else None
    if strategy == "group" and group is None:
        raise ModelError("quantization_config: strategy group without group_size")
    has_zeros = part.get("symmetric", True) is not True
    is_made_for_ints = isinstance(inputs, dict) and inputs.get("num_bits") == 8 and inputs.get("type") == "int"
    rounds = is_made_for_ints and (form == "int-quantized" or bits == 4)
    details = f"{', with zero points' if has_zeros else ''}{', by activation order' if _ORDERS[order] else ''}"
    details += ", for activations of 8 bits" if rounds else ""
    return IntScheme(
        layout=form,
        bits=bits,
        group=group,
        has_zeros=has_zeros,
        has_order=_ORDERS[order] and form == "pack-quantized",
        rounds_inputs=rounds,
        name=f"compressed-tensors {form}, {bits} bits {_groups_name(group)}{details}",
    )


def _check_layout(kind: str, config: Json, forms: Sequence[str]) -> None:
    """Refuses another `format`, and a `backend` whose weights have a layout of its own."""
    form, backend = config.get("format"), config.get("backend")
    if form and str(form).lower() not in forms:
        raise ModelError(f"quantization_config: {kind} in format {form!r:.80} is not supported: use {forms[0]}")
    if str(backend).lower().startswith(_OTHER_LAYOUTS):
        raise ModelError(f"quantization_config: {kind} of backend {backend!r:.80} is not supported: it has another layout")


def _check_dynamic(rules: Any) -> None:
    """Refuses rules of GPTQModel that change the scheme of some layers; those that begin with `-:` leave layers unquantised."""
    if not rules:
        return
    if not isinstance(rules, dict):
        raise ModelError("quantization_config: dynamic: expected an object")
    for rule, changes in rules.items():
        if changes and not str(rule).startswith("-:"):
            raise ModelError(
                f"quantization_config: the rule {rule!r:.80} of dynamic is not supported: use one scheme for all layers"
            )


def _group_size(size: Any) -> int | None:
    if size is None or size == -1:
        return None
    if not isinstance(size, int) or isinstance(size, bool) or size <= 0:
        raise ModelError(f"quantization_config: group_size {size!r} is not supported: expected a positive integer or -1")
    return size


def _groups_name(group: int | None) -> str:
    return "with scales per tensor or output" if group is None else f"in groups of {group} inputs"
