"""The lab's checkpoint: small, but true to form.

``config.json`` has the keys of the real one; the table sizes follow from the primes above a small
``engram_vocab_size``, as they do there; a layer's weight and scale lie in different files, found by the index. Content
depends on the seed alone, so two lab hosts that make it hold the same bytes.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from lockstep_core import engram
from lockstep_core.safetensors import INDEX

BLOCK = 4 << 20
LAYERS = (1, 14)
NGRAM_SIZES = 3
HEADS = 8

# float8_e4m3fn has two NaN patterns; a trained table has none.
_FINITE = bytes({0x7F: 0x7E, 0xFF: 0xFE}.get(byte, byte) for byte in range(256))
# float8_e8m0fnu is an exponent; 118 to 125 are the factors 2^-9 to 2^-2.
_EXPONENTS = bytes(118 + byte % 8 for byte in range(256))

Tensors = Mapping[str, tuple[str, list[int], bytes | None]]


def config(engram_vocab_size: int) -> dict[str, object]:
    """The checkpoint's config.json: the real keys, with tables for ``engram_vocab_size``."""
    columns = engram.prime_columns(len(LAYERS), NGRAM_SIZES, HEADS, engram_vocab_size)
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "torch_dtype": "bfloat16",
        "quantization_config": {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [32, 32]},
        "text_config": {
            "model_type": "deepseek_v41_text",
            "hidden_size": 64,
            "num_hidden_layers": 40,
            "num_attention_heads": 64,
            "vocab_size": 129280,
            "engram_layer_ids": list(LAYERS),
            "engram_num_embeddings": [sum(layer) for layer in columns],
            "engram_max_ngram_size": NGRAM_SIZES + 1,
            "engram_n_heads": HEADS,
            "engram_head_dim": engram.WEIGHT_BYTES,
            "engram_vocab_size": engram_vocab_size,
            "engram_compressed_vocab_size": 99092,
            "engram_pad_token_id": 2,
        },
    }


def make(
    path: Path,
    engram_vocab_size: int = 16000,
    seed: int = 0,
    revision: str = "fb2764a5cf321eaa5070ca8f9e892818f477c16d",
) -> dict[str, object]:
    """Make a checkpoint directory and return its config.

    16000 gives about 384,000 rows, 101 MB, a layer. ``revision`` is left where a downloader leaves it. A directory that
    holds a complete checkpoint of the same arguments is kept as it is.
    """
    made = config(engram_vocab_size)
    mark = {"engram_vocab_size": engram_vocab_size, "seed": seed, "revision": revision}
    done = path / ".lab.json"
    if done.exists() and json.loads(done.read_text()) == mark:
        return made
    path.mkdir(parents=True, exist_ok=True)
    done.unlink(missing_ok=True)
    (path / "config.json").write_text(json.dumps(made, indent=2, sort_keys=True) + "\n")
    notes = path / ".cache" / "huggingface" / "download"
    notes.mkdir(parents=True, exist_ok=True)
    (notes / "config.json.metadata").write_text(f"{revision}\n0\n0\n")
    parts = _parts(made)
    weight_map, total = {}, 0
    for number, tensors in enumerate(parts, start=1):
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        total += _write(path / file, tensors, seed)
        weight_map.update(dict.fromkeys(tensors, file))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (path / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    done.write_text(json.dumps(mark) + "\n")
    return made


def make_shards(checkpoint: Path, out: Path, tp: int, rank: int, split: str) -> list[Path]:
    """Pack a rank's shards, all layers, as they lie on a host that once served at another ``tp`` or ``split``."""
    out.mkdir(parents=True, exist_ok=True)
    layers = engram.layout(engram.read_config(checkpoint))
    return [out / str(engram.pack(checkpoint, out, layer, rank, tp, split)["file"]) for layer in layers]


def _parts(made: Mapping[str, object]) -> list[Tensors]:
    """The tensors by file: (dtype, shape, table to draw bytes from or None for small plain ones)."""
    tables = engram.layout(made)
    weights: dict[str, tuple[str, list[int], bytes | None]] = {}
    scales: dict[str, tuple[str, list[int], bytes | None]] = {}
    for layer, table in tables.items():
        name = f"layers.{layer}.engram.embed"
        weights[f"{name}.weight"] = ("F8_E4M3", [table["rows"], engram.WEIGHT_BYTES], _FINITE)
        scales[f"{name}.scale"] = ("F8_E8M0", [table["rows"], engram.SCALE_BYTES], _EXPONENTS)
    first, second = list(weights), list(scales)
    return [
        {"embed.weight": ("BF16", [128, 64], None), first[0]: weights[first[0]], second[1]: scales[second[1]]},
        {"norm.weight": ("F32", [64], None), first[1]: weights[first[1]], second[0]: scales[second[0]]},
        {f"layers.{layer}.engram.norm.weight": ("BF16", [64], None) for layer in tables},
    ]


def _write(path: Path, tensors: Tensors, seed: int) -> int:
    """Write one safetensors file and return the bytes of its data."""
    width = {"BF16": 2, "F32": 4}
    header, sizes, at = {}, {}, 0
    for name, (dtype, shape, _) in tensors.items():
        size = width.get(dtype, 1)
        for part in shape:
            size *= part
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        sizes[name] = size
        at += size
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, (_, _, table) in tensors.items():
            for block in _bytes(f"{seed}/{name}", sizes[name]):
                file.write(block.translate(table) if table else bytes(len(block)))
    return at


def _bytes(seed: str, size: int) -> Iterator[bytes]:
    source = random.Random(seed)  # noqa: S311 - made-up weights, the same on each host
    for at in range(0, size, BLOCK):
        yield source.randbytes(min(BLOCK, size - at))


if __name__ == "__main__":
    make(Path(sys.argv[1]))
