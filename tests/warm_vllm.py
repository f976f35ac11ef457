"""A vLLM server that takes a third of the CPU time, for tests of what happens around it.

vLLM's default on a CPU is a worker process beside the engine. Both look for messages of each other in a loop that does
not sleep, for a second after each request: 16 conversations of 8 requests took 10.4 CPU seconds, and 3.8 with the
worker inside the engine. test_server.py and the slow tests have vLLM's default.
"""

from bench_common import VLLMServer
from warm_python import executable


class WarmVLLMServer(VLLMServer):
    """As `VLLMServer`, which see: a fork that has its libraries, with one engine process, which computes too."""

    def __init__(self, model, *flags, **kwargs):
        # vLLM takes `uni` on a CPU only where it is told to use no processes; the engine has one all the same.
        env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
        flags = ("--distributed-executor-backend", "uni", *flags)
        super().__init__(model, *flags, python=executable(), env=env, **kwargs)
