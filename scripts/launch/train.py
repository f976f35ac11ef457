"""Train by a recipe: start the server that it needs, train beside it, and stop the server whatever happens.

    bash scripts/train.sh RECIPE [trainer arguments...]
    bash scripts/train.sh hf_recipes/tiny/calculator-vllm.yaml --max_steps 10

The server runs vLLM, or SGLang with `rollout_engine: sglang`. With GPUs the last one generates and the others train,
one process each. Without, both share the CPU. With NUM_SERVERS and SERVER_TP the last NUM_SERVERS * SERVER_TP GPUs
generate. With --data-parallel-size N in SERVER_ARGS these are N times as many.
Recipes that use no server (use_vllm: false, vllm_mode: colocate, a server elsewhere) are only launched.

Environment:
    CUDA_VISIBLE_DEVICES  the GPUs to share out
    NUM_PROCESSES         training processes (default: GPUs - 1; on a CPU 2 beside a server, else 1)
    ACCELERATE_CONFIG     an accelerate configuration (default, of hf_recipes/accelerate: one.yaml for one GPU, for
                          several zero3.yaml if DeepSpeed is installed, else ddp.yaml; without GPUs cpu.yaml)
    NUM_SERVERS           servers (default 1); each has its own port, its own GPUs and its own log
    SERVER_TP             GPUs of one server, by tensor parallelism (default 1)
    SERVER_ARGS           further flags for the server, separated by spaces
                          (VLLM_SERVERS, VLLM_TP and VLLM_ARGS are other names of these three)
    SGLANG_PYTHON         the interpreter that has SGLang (default: .venv-sglang/bin/python, of setup.sh --sglang)
    SERVER_TIMEOUT        seconds that a server may take to start (default 1800)
    SERVER_RESTARTS       how often each server that dies during training is started again (default 3)
    STOP_TIMEOUT          seconds that the trainer may take to save itself when it is told to stop (default 300)
    TRAINER               the trainer (default: mt_grpo_trainer.py), for a copy that does something else
    PYTHON                the interpreter of everything that is started (default: the one that runs this file)

These are started, each in a session of its own: the checks (launch_plan.py), the servers and the trainer.
Before them starts the keeper (keeper.py), which ends all of them when this process, which imports no torch, is gone.
"""

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NoReturn

if __name__ == "__main__":  # imports begin in scripts/
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from launch import keeper

ROOT = Path(__file__).resolve().parents[2]
STOP_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
LIMITS = {"SERVER_TIMEOUT": 1800, "SERVER_RESTARTS": 3, "STOP_TIMEOUT": 300}
# Names of variables that are not one engine's, and the variables that they are.
OTHER_VARIABLES = {"NUM_SERVERS": "VLLM_SERVERS", "SERVER_TP": "VLLM_TP", "SERVER_ARGS": "VLLM_ARGS"}
TITLES = {"vllm": "vLLM", "sglang": "SGLang"}
Command = tuple[list[str], dict[str, str]]  # (arguments, additions to the environment)
PROGRAM = "train"  # of scripts/, in messages; serve.py has its own


def say(text: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads any more, or the disk is full: the launch goes on
        print(f"{PROGRAM}: {text}", flush=True)


def fail(message: str, status: int) -> NoReturn:
    """End with an error; 2 is for wrong usage."""
    print(f"{PROGRAM}: error: {message}", file=sys.stderr, flush=True)
    raise SystemExit(status)


# -- The launch, in order --


def main() -> None:
    recipe, arguments = read_command_line(sys.argv[1:])
    vllm_variables()
    limits = {name: whole_number(name, default) for name, default in LIMITS.items()}
    whole_number("NUM_PROCESSES", 0)  # launch_plan.py decides, where it knows the GPUs
    for name in ("no_proxy", "NO_PROXY"):
        os.environ[name] = ",".join(filter(None, [os.environ.get(name), "127.0.0.1", "localhost"]))
    python = os.environ.get("PYTHON") or sys.executable
    exit_on_signals()
    launch = Launch(limits["STOP_TIMEOUT"])
    try:
        status = run(launch, python, recipe, arguments, limits)
    finally:
        launch.end()
    sys.exit(status)


def run(launch: "Launch", python: str, recipe: str, arguments: list[str], limits: dict[str, int]) -> int:
    """The checks, the server if the recipe needs one, and the training. Returns the trainer's exit code."""
    # Everything that can be wrong with the recipe and the arguments is found here, before a server is started.
    say(f"checking {recipe}")
    # The process of the checks imports the trainer and is gone before anything else is started.
    command = [python, "scripts/launch/launch_plan.py", "--config", recipe, *arguments]
    checks = launch.start("checks", (command, package_path()), stdout=subprocess.PIPE, text=True)
    output, _ = checks.communicate()
    if checks.returncode or not output.strip():  # it said what is wrong
        raise SystemExit(exit_code(checks))
    plan = json.loads(output)
    Path(plan["output_dir"]).mkdir(parents=True, exist_ok=True)
    arguments = ["--config", recipe, *arguments]
    servers = start_servers(launch, python, plan) if plan["starts_server"] else []
    if servers:
        ports = [str(server.port) for server in servers]
        if len(servers) == 1:
            arguments += ["--vllm_server_port", *ports]
        else:
            arguments += ["--vllm_server_base_url", ",".join(f"http://127.0.0.1:{port}" for port in ports)]
        if wanted := plan["wanted_group_port"]:
            group_port = lock_ports(wanted, len(servers))
            if group_port != wanted:
                say(f"port {wanted} is taken: weights are sent through port {group_port} (vllm_group_port)")
            arguments += ["--vllm_group_port", str(group_port)]
        for server in servers:
            server.wait(limits["SERVER_TIMEOUT"])
    status = train(launch, trainer_command(python, plan, arguments), servers, limits["SERVER_RESTARTS"])
    if status:
        for server in servers:
            if not server.is_alive():
                server.show_log()
                print(f"train: error: {server.name} ended during training; see above.", file=sys.stderr, flush=True)
        what = "preflight" if plan["preflight"] else "trainer"
        say(f"the {what} failed with exit code {status}")
    elif not plan["preflight"]:
        say(f"done; the model and trainer_state.json are in {plan['output_dir']}")
    return status


def start_servers(launch: "Launch", python: str, plan: dict[str, Any]) -> "list[Server]":
    """Start the servers of a plan, each on its own port and GPUs, without waiting for them."""
    servers, wanted, title, several = [], plan["wanted_port"], TITLES[plan["engine"]], len(plan["server_gpus"]) > 1
    for number, gpus in enumerate(plan["server_gpus"]):
        port = lock_ports(wanted)
        if port != wanted:
            say(f"port {wanted} is taken, using {port}")
        wanted = port + 1
        name = f"{title} server {number}" if several else f"the {title} server"
        log = Path(plan["output_dir"]) / f"{plan['engine']}_server{f'.{number}' if several else ''}.log"
        servers.append(Server(launch, server_command(python, plan, port, gpus), port, name, log))
        say(f"starting {name} on {f'GPU {gpus}' if gpus else 'the CPU'}, port {port}; log: {log}")
        servers[-1].start()
    return servers


def train(launch: "Launch", command: Command, servers: "list[Server]", restarts: int) -> int:
    """Run the trainer to its end. A server that dies meanwhile is started again, each at most `restarts` times."""
    trainer = launch.start("trainer", command)
    while trainer.poll() is None:
        for server in servers:
            if server.restarted < restarts and not server.is_alive():
                server.restarted += 1
                server.show_log()
                say(f"{server.name} ended; starting it again ({server.restarted} of {restarts})")
                server.start()
        time.sleep(1)
    return exit_code(trainer)


# -- What is started --


def server_command(python: str, plan: dict[str, Any], port: int, gpus: str, host: str = "127.0.0.1") -> Command:
    """A server: for this machine alone, with the endpoints and log-probabilities that the trainer needs.

    `gpus` are its GPUs as in CUDA_VISIBLE_DEVICES; without any it runs on the CPU.
    """
    make = {"vllm": vllm_command, "sglang": sglang_command}[plan["engine"]]
    command, environment = make(python, plan, gpus)
    shared = ["--host", host, "--port", str(port), "--revision", plan["revision"], "--dtype", plan["dtype"]]
    if plan["trust_remote_code"]:
        shared.append("--trust-remote-code")
    if plan["tensor_parallel"] > 1:
        shared += ["--tensor-parallel-size", str(plan["tensor_parallel"])]
    if gpus:  # in float32 vLLM's attention by Triton would round to TF32, which the first push's proof finds
        environment |= {"CUDA_VISIBLE_DEVICES": gpus, "TRITON_F32_DEFAULT": "ieee"}
    command[5:5] = shared  # after the program and its model
    return [*command, *os.environ.get("VLLM_ARGS", "").split()], environment


def sglang_command(python: str, plan: dict[str, Any], gpus: str) -> Command:
    """An SGLang server, by the interpreter of its own environment, without what servers have in common."""
    command = [
        sglang_python(), "-m", "sglang.launch_server", "--model-path", plan["model"],
        "--context-length", str(plan["max_model_len"] + 8), "--sampling-defaults", "openai",
    ]  # fmt: skip
    # What the vision tower made of images would outlive new weights. Ids beside images would be tokenised again. A
    # health check would wait for a paused engine. It keeps a few tokens of the context for itself.
    environment = {
        "SGLANG_VLM_CACHE_SIZE_MB": "0",
        "SGLANG_MM_AVOID_RETOKENIZE": "1",
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    }
    if not gpus:
        environment |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or "1"}
        command += [
            "--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
            "--disable-overlap-schedule", "--cuda-graph-backend-decode=disabled", "--max-running-requests", "64",
            "--sleep-on-idle",  # else it takes a core while it waits
            "--max-total-tokens", str(max(32768, 2 * plan["max_model_len"])),
        ]  # fmt: skip
        if plan["tensor_parallel"] > 1 and "SGLANG_CPU_OMP_THREADS_BIND" not in os.environ:  # one core for each worker
            cores = sorted(os.sched_getaffinity(0))
            bound = [str(cores[rank % len(cores)]) for rank in range(plan["tensor_parallel"])]
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(bound)
        command += ["--mm-attention-backend", "sdpa"] if plan["images"] else []
    if plan["images"]:  # the image of a warm-up may be of no size that a small model reads
        command += ["--enable-multimodal", "--skip-server-warmup"]
    return command, environment


def sglang_python() -> str:
    return os.environ.get("SGLANG_PYTHON") or str(ROOT / ".venv-sglang/bin/python")


def vllm_command(python: str, plan: dict[str, Any], gpus: str) -> Command:
    """A vLLM server, without what servers have in common."""
    command = [  # not the `vllm` command: the CPU package has none
        python, "-m", "vllm.entrypoints.openai.api_server", "--model", plan["model"], "--max-model-len",
        str(plan["max_model_len"]), "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm",
    ]  # fmt: skip
    environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if plan["adapters"]:  # the policy's adapter is pushed beside the model, and loaded while the server runs
        rank, slots = map(str, plan["adapters"])
        command += ["--enable-lora", "--max-loras", slots, "--max-lora-rank", rank]
        environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if plan["images"]:  # ids with images come by an address that is off otherwise; no video is kept room for
        command += ["--enable-scale-out", "--limit-mm-per-prompt", '{"video": 0}']
    if gpus and plan["weight_sync"] != "disk":  # the weights arrive in up to 4.4 GiB of buffers, outside vLLM's share
        command += ["--weight-transfer-config", '{"backend": "nccl"}', "--gpu-memory-utilization", "0.85"]
    if not gpus:
        environment["VLLM_CPU_KVCACHE_SPACE"] = os.environ.get("VLLM_CPU_KVCACHE_SPACE") or "1"
        command += ["--enforce-eager", "--max-num-seqs", "128"]
    return command, environment


def trainer_command(python: str, plan: dict[str, Any], arguments: list[str]) -> Command:
    """The trainer by `accelerate launch`, one process per GPU or as many as were asked for."""
    processes, gpus = plan["num_processes"], plan["trainer_gpus"]
    default = ("zero3" if plan["deepspeed"] and not plan.get("images") else "ddp") if gpus else "cpu"
    config = os.environ.get("ACCELERATE_CONFIG") or ""
    if not config and (processes > 1 or gpus):  # also of one: accelerate would take the user's `accelerate config`
        config = f"hf_recipes/accelerate/{default if processes > 1 else 'one'}.yaml"
    command = [python, "-m", "accelerate.commands.launch", "--num_processes", str(processes), "--num_machines", "1"]
    if config:
        command += ["--config_file", config]
        if Path(config).stem in ("ddp", "cpu"):  # the recipe's; that of sharded weights also says how they are kept
            command += ["--mixed_precision", plan["precision"]]
    else:
        command += ["--mixed_precision", "no", "--dynamo_backend", "no", "--cpu"]
    if processes > 1:
        command += ["--main_process_port", "0"]  # any free one
    command += [os.environ.get("TRAINER") or "mt_grpo_trainer.py", *arguments]
    if plan["float32_for_ddp"] and (not config or Path(config).stem in ("ddp", "one")):
        say("without DeepSpeed the weights are kept in float32 (--dtype float32): in bfloat16 small steps are lost")
        command += ["--dtype", "float32"]
    where, how = f"GPU {gpus}" if gpus else "the CPU", f", by {config}" if config else ""
    say(f"training with {processes} process(es) on {where}{how}, output: {plan['output_dir']}")
    on_cpu = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or "1", "ACCELERATE_USE_CPU": "true"}
    devices = {"CUDA_VISIBLE_DEVICES": gpus} if gpus else on_cpu
    seconds = os.environ.get("STOP_TIMEOUT") or str(LIMITS["STOP_TIMEOUT"])  # PyTorch's launcher gives 30
    return command, {**devices, **package_path(), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": seconds}


def package_path() -> dict[str, str]:
    """Where a copy of the trainer, in whatever folder, finds the package `mt_grpo`."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}


class Server:
    """A server of a launch."""

    def __init__(self, launch: "Launch", command: Command, port: int, name: str, log: Path):
        self.launch, self.command, self.port, self.name, self.log = launch, command, port, name, log
        self.restarted = 0
        self.log.touch()
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        """Start it, or start it again without what the last one left behind, such as its engine."""
        if self.process:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        with open(self.log, "ab") as log:
            self.process = self.launch.start("server", self.command, stdout=log, stderr=subprocess.STDOUT)

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def is_healthy(self) -> bool:
        # By hand: an HTTP library would take a quarter of this process's memory.
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=2) as connection:
            connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
            return b" 200 " in connection.recv(64)
        return False

    def wait(self, seconds: int) -> None:
        """Wait until it answers, which it must do within `seconds`. Says so every ten seconds."""
        began, waited = time.monotonic(), 0
        problem = f"{self.name} ended while it started; see above."
        while self.is_alive():
            if self.is_healthy():
                return say(f"{self.name} is up after {waited} s")
            if waited > seconds:
                problem = f"{self.name} is not up after {waited} s (SERVER_TIMEOUT)."
                break
            if waited % 10 == 0:
                say(f"waiting for {self.name}, {waited} s")
            time.sleep(1)
            waited = int(time.monotonic() - began)
        self.show_log()
        fail(problem, 1)

    def show_log(self) -> None:
        with open(self.log, "rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 2**16))
            lines = log.read().decode(errors="replace").splitlines()[-30:]
        print(f"train: the last lines of {self.log}:", *lines, sep="\n    ", file=sys.stderr, flush=True)


# -- Nothing is left behind --


class Launch:
    """The processes of this launch and their keeper, which reads of them on a pipe until this process is gone."""

    def __init__(self, stop_timeout: int):
        self.mark = f"{os.getpid()}-{os.urandom(8).hex()}"
        self.told: list[str] = []
        self.seconds = stop_timeout
        # Blocked signals stay blocked in the keeper: nothing but a KILL ends it early.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        command = [sys.executable, str(ROOT / "scripts/launch/keeper.py"), self.mark, str(stop_timeout)]
        self.keeper = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def start(self, name: str, command: Command, **options: Any) -> subprocess.Popen:
        """Start a command in a session of its own, known to the keeper."""
        arguments, environment = command
        # close_fds=False: the pipe to the keeper closes as the program starts, with the mark in its environment.
        # So the keeper misses no process between fork and exec.
        environment = {**os.environ, **environment, keeper.MARK: self.mark}
        options |= {"stdin": subprocess.DEVNULL, "start_new_session": True, "close_fds": False}
        process = subprocess.Popen(arguments, env=environment, **options)
        self.told.append(f"process {name} {process.pid}\n")
        with contextlib.suppress(BrokenPipeError):  # without a keeper, `end` does its work
            os.write(self.keeper.stdin.fileno(), self.told[-1].encode())
        return process

    def end(self) -> None:
        """Let the keeper end what is left, and wait for it."""
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        self.keeper.stdin.close()
        if self.keeper.wait():  # it was killed
            keeper.clean_up(self.told, self.mark, self.seconds)


def exit_on_signals() -> None:
    """Exit with 128 + the number of the first signal. One that the caller ignores, as nohup does, stays ignored."""

    def stop(number: int, frame: Any) -> NoReturn:
        for other in STOP_SIGNALS:
            signal.signal(other, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, stop)


def exit_code(process: subprocess.Popen) -> int:
    """The exit code of a process as a shell gives it: 128 + the number of the signal that ended it."""
    code = process.wait()
    return code if code >= 0 else 128 - code


# -- What is asked for --


def read_command_line(argv: list[str]) -> tuple[str, list[str]]:
    """(recipe, further arguments). Names count from the caller's folder, then the root becomes the current one."""
    if {"--help", "-h"} & set(argv):
        sys.exit(print(sys.modules["__main__"].__doc__))
    recipes = " ".join(sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("hf_recipes/[!a]*/*.yaml")))
    recipe = argv[0] if argv else ""
    if not recipe or recipe.startswith("-"):
        fail(f"no recipe. Usage: bash scripts/{PROGRAM}.sh RECIPE [trainer arguments...] Recipes: {recipes}", 2)
    if os.path.isfile(recipe):
        recipe = os.path.abspath(recipe)
    if trainer := os.environ.get("TRAINER"):
        if not os.path.isfile(trainer):
            fail(f"TRAINER={trainer!r} is not a file", 2)
        os.environ["TRAINER"] = os.path.abspath(trainer)
    if os.sep in os.environ.get("PYTHON", ""):
        os.environ["PYTHON"] = os.path.abspath(os.environ["PYTHON"])
    os.chdir(ROOT)
    if not os.path.isfile(recipe):
        fail(f"the recipe {recipe!r} is not a file. Recipes: {recipes}", 2)
    return recipe, argv[1:]


def vllm_variables() -> None:
    """Give the variables of `OTHER_VARIABLES` the names that everything else reads, and check their numbers."""
    for name, variable in OTHER_VARIABLES.items():
        value = os.environ.get(name)
        if value is not None and os.environ.setdefault(variable, value) != value:
            fail(f"{name} and {variable} are one setting, and have two values. Remove one of them.", 2)
    whole_number("VLLM_SERVERS", 1, least=1), whole_number("VLLM_TP", 1, least=1)


def whole_number(name: str, default: int, least: int = 0) -> int:
    """An environment variable's."""
    text = os.environ.get(name) or str(default)
    if not text.isdecimal() or int(text) < least:
        fail(f"{name}={text!r}: expected a whole number, {least} or more", 2)
    return int(text)


def lock_ports(wanted: int, count: int = 1) -> int:
    """The first of `count` ports in a row, from `wanted` on, where nothing listens and that no other launch has.

    Two launches that start together both see the same port free. Whoever has its lock may use it, as long as it lives.
    """
    for first in range(wanted, 2**16 - count + 1):
        ports = range(first, first + count)
        locks = [lock for port in ports if (lock := lock_port(port)) is not None]
        if len(locks) == count and all(map(is_free, ports)):
            return first  # the locks end with this process
        for lock in locks:
            os.close(lock)
    fail(f"no port from {wanted} on is free on this machine and can be locked in {tempfile.gettempdir()}", 1)


def lock_port(port: int) -> int | None:
    """The descriptor of a port's locked file; None if another launch has it. No link of another user is followed."""
    path = Path(tempfile.gettempdir()) / f"mt-grpo-{os.getuid()}-port-{port}.lock"
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with contextlib.suppress(OSError):
        descriptor = os.open(path, flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except OSError:
            os.close(descriptor)
    return None


def is_free(port: int) -> bool:
    """Whether nothing listens there, on any address: NCCL's group does not use 127.0.0.1."""
    with contextlib.suppress(OSError, OverflowError), socket.socket() as probe:  # no port has such a number
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("", port))
        return True
    return False


if __name__ == "__main__":
    main()
