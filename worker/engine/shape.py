"""The shape in which an instance serves: the precision of each half of each layer. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from bus.messages import PARTS, LayerShape, Part
from bus.precisions import BITS, QUANTIZED, KVPrecision, Precision, is_below


def shape_id(shape: Sequence[LayerShape], tp: int = 1, kv: KVPrecision = "full") -> str:
    """Return the id of a shape, with its layers by precision: `tp1-full`, `tp1-int8x1-int4x2.5-kv8`."""
    halves = Counter(precision for _, _, precision in _halves(shape))
    names = [f"{name}x{halves[name] / len(PARTS):g}" for name in QUANTIZED if halves[name]]
    return "-".join([f"tp{tp}", *(names or ["full"]), *([f"kv{BITS[kv]}"] if kv != "full" else [])])


def below_floor(shape: Sequence[LayerShape], floor: Precision, kv: KVPrecision = "full") -> str | None:
    """Return why a request with this floor cannot run in this shape, or None."""
    if is_below(kv, floor):
        return f"the KV cache is in {kv}; the request takes no less than {floor}"
    for layer, part, precision in _halves(shape):
        if is_below(precision, floor):
            where = f"{part} of layer {layer} is in {precision}"
            return f"{where}; the request takes no less than {floor}"
    return None


def _halves(shape: Sequence[LayerShape]) -> Iterator[tuple[int, Part, Precision]]:
    for i, layer in enumerate(shape):
        for part in PARTS:
            yield i, part, layer.of(part)
