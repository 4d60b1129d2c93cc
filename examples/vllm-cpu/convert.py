"""Turn a quantized Llama GGUF file into a plain Hugging Face folder with float32 weights.

    convert.py FILE.gguf OUT

OUT (which must not exist) gets ``config.json``, ``generation_config.json``, ``model.safetensors``, the
tokenizer with its chat template, and ``SHA256SUMS`` of all of them, written last.
Needs torch, transformers, gguf and accelerate.
Exit status 1 with one line where the file is not a Llama model or OUT is there.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig


def convert(gguf: Path, out: Path) -> int:
    """Write the float32 folder ``out`` from ``gguf``; returns the number of parameters."""
    if out.exists():
        raise SystemExit(f"{out}: is there already; remove it and run again")
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    if loaded.config.model_type != "llama":
        raise SystemExit(f"{gguf}: holds a {loaded.config.model_type} model; only llama is converted")
    # A model loaded from GGUF counts as quantized and refuses to be saved: a fresh one takes its weights.
    quantized = {"quantization_config", "_name_or_path", "_model_name_or_path"}
    config = LlamaConfig(**{k: v for k, v in loaded.config.to_dict().items() if k not in quantized})
    plain = type(loaded)(config)
    plain.load_state_dict({name: tensor.float() for name, tensor in loaded.state_dict().items()}, strict=True)
    plain.save_pretrained(out)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)
    return sum(parameter.numel() for parameter in plain.parameters())


def seal(out: Path) -> None:
    """Write ``SHA256SUMS`` of every file in ``out``, in the format that ``sha256sum --check`` reads."""
    lines = []
    for file in sorted(out.iterdir()):
        with file.open("rb") as stream:
            lines.append(f"{hashlib.file_digest(stream, 'sha256').hexdigest()}  {file.name}\n")
    (out / "SHA256SUMS").write_text("".join(lines))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit("usage: convert.py FILE.gguf OUT")
    target = Path(sys.argv[2])
    parameters = convert(Path(sys.argv[1]), target)
    seal(target)
    print(f"{parameters / 1e6:.1f} M parameters, float32")
