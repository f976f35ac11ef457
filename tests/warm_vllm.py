"""A vLLM server that takes a third of the CPU time, for tests of what happens around it.

test_server.py and the slow tests have vLLM's default, a worker process beside the engine.
"""

from bench.common import IN_THE_ENGINE, IN_THE_ENGINE_ENV, VLLMServer
from warm_python import executable


class WarmVLLMServer(VLLMServer):
    """As `VLLMServer`, which see: a fork that has its libraries, and computes in the engine's process."""

    def __init__(self, model, *flags, **kwargs):
        super().__init__(model, *IN_THE_ENGINE, *flags, python=executable(), env=IN_THE_ENGINE_ENV, **kwargs)
