"""A real SGLang server on the CPU, for the tests that need one."""

from pathlib import Path

from bench.common import VLLMServer


class SGLangServer(VLLMServer):
    """As `VLLMServer`, by what `scripts/train.sh` starts; `SGLANG_PYTHON`, or .venv-sglang, has SGLang.

    Args:
        context: Tokens of its context.
        images: Whether it reads images.
    """

    def __init__(self, model: str | Path, *flags: str, context: int = 640, images: bool = False, **kwargs):
        super().__init__(model, *flags, timeout=600.0, **kwargs)
        self.context, self.images = context, images

    def command(self) -> tuple[list[str], dict[str, str]]:
        from launch.train import server_command

        plan = {
            "engine": "sglang", "model": str(self.model), "revision": "main", "dtype": "float32",
            "max_model_len": self.context, "trust_remote_code": False, "tensor_parallel": 1, "images": self.images,
        }  # fmt: skip
        command, env = server_command(self.python, plan, self.port, "")
        return [*command, *self.flags], env

    def healthy(self) -> bool:
        return self.process is not None and self.process.poll() is None and super().healthy()
