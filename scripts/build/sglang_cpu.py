"""SGLang where there is no GPU: what `setup.sh --sglang` installs beside its wheel, and a stand-in for its kernels.

    python scripts/build/sglang_cpu.py requirements    # one per line, of the installed wheel, without what needs a GPU
    python scripts/build/sglang_cpu.py kernels         # puts the stand-in where `sgl_kernel` would be

It is run by the interpreter of SGLang's environment. The wheel's own requirements pin a torch for GPUs.
"""

import argparse
import importlib.metadata
import importlib.util
import re
import shutil
import sysconfig
from pathlib import Path

# Kernels and compilers for GPUs, what setup.sh installs by itself, and what a server of text and images does not load.
LEFT_OUT = {
    "torch", "torchvision", "torchaudio", "torchcodec", "decord2", "av", "cuda-python", "flash-attn-4",
    "flashinfer-python", "humming-kernels", "nvidia-cutlass-dsl", "nvidia-mathdx", "nvshmem4py-cu13", "quack-kernels",
    "sgl-deep-ep", "sgl-deep-gemm", "sgl-flash-mla", "sglang-kernel", "tilelang", "smg-grpc-servicer",
    "deepseek-recipe", "tml-renderers", "modelscope", "blobfile", "build",
}  # fmt: skip
FURTHER = ["triton", "datasets"]  # imported, and brought by what was left out
# An operator by which SGLang knows that the kernels were compiled for a processor's own matrix units.
OF_REAL_KERNELS = {"convert_weight_packed"}


def requirements() -> list[str]:
    """The requirements of the installed wheel that a CPU can have."""
    names = {text: re.match(r"[\w.-]+", text)[0] for text in importlib.metadata.requires("sglang")}
    kept = [text for text, name in names.items() if name.lower().replace("_", "-") not in LEFT_OUT]
    return [text for text in kept if "extra ==" not in text] + FURTHER


def operators(source: Path) -> list[str]:
    """The operators that SGLang's source names, as `torch.ops.sgl_kernel.NAME` or `sgl_kernel::NAME`."""
    found = set()
    for path in source.rglob("*.py"):
        found.update(re.findall(r"(?:torch\.ops\.sgl_kernel\.|sgl_kernel::)(\w+)", path.read_text(errors="replace")))
    return sorted(found - OF_REAL_KERNELS)


def install_kernels() -> None:
    """Put the stand-in into this environment, unless it has real kernels."""
    packages = Path(sysconfig.get_path("purelib"))
    folder = packages / "sgl_kernel"
    if importlib.util.find_spec("sgl_kernel") is not None and not (folder / "operators.txt").exists():
        return
    folder.mkdir(exist_ok=True)
    shutil.copy(Path(__file__).with_name("sgl_kernel_cpu.py"), folder / "__init__.py")
    (folder / "operators.txt").write_text("\n".join(operators(packages / "sglang")) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("requirements", "kernels"))
    print("\n".join(requirements())) if parser.parse_args().what == "requirements" else install_kernels()
