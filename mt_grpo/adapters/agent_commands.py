"""An agent as a command: it gets a row and an address, and is ended with all its processes."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from mt_grpo.adapters.agent_server import AgentServer
from mt_grpo.adapters.agent_session import AgentSession

OUTPUT_BYTES = 2**20  # of a command's output, the end is kept
SECONDS_TO_END = 2.0  # between SIGTERM and SIGKILL
SECONDS_OF_OUTPUT = 3.0  # for what a command has written, where a daemon of its own holds its output open
# What tells a process that it is a rank of a training run. An agent that reads it would wait for the others.
OF_RANKS = ("RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "GROUP_", "ROLE_", "TORCHELASTIC_", "ACCELERATE_", "FSDP_")
LAUNCHER = Path(__file__).with_name("agent_launcher.py")


class CommandAgent:
    """An agent that is a program: the row on its standard input, the result as its last line of output."""

    def __init__(self, command: str):
        self.arguments = shlex.split(command)
        self.name = "agent_command"

    async def run(self, row: dict[str, Any], server: AgentServer, session: AgentSession) -> Any:
        """The program's result. It is ended with all processes of its group when this is cancelled."""
        watched, held = os.pipe()  # closed with this process
        starting = asyncio.ensure_future(asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", str(LAUNCHER), str(watched), *self.arguments, pass_fds=[watched],
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            start_new_session=True, env=environment_of(server.address, session.key),
        ))  # fmt: skip
        starting.add_done_callback(lambda _: os.close(watched))
        try:
            # Shielded: asyncio kills a process whose start is cancelled, here the launcher, and so leaves the command.
            process = await asyncio.shield(starting)
        except BaseException:
            release(held)
            raise
        sending = asyncio.ensure_future(send(process.stdin, json.dumps(row, default=str).encode()))
        reading = [asyncio.ensure_future(read_end(pipe)) for pipe in (process.stdout, process.stderr)]
        try:
            code = await process.wait()
        finally:
            try:
                with suppress(TimeoutError, ProcessLookupError):
                    if process.returncode is None:
                        process.terminate()
                        await asyncio.wait_for(process.wait(), SECONDS_TO_END)
            finally:  # even where this is cancelled meanwhile
                release(held)
                sending.cancel()
            await process.wait()
        # Something that it has left behind may hold its output open: what was written until its end is there at once.
        await asyncio.wait(reading, timeout=SECONDS_OF_OUTPUT)
        for each in reading:
            each.cancel()
        output, errors = await asyncio.gather(*reading)
        if code:
            said = errors.decode(errors="replace").strip()[-500:]
            raise RuntimeError(f"the command ended with code {code}: {said or 'it said nothing'}")
        last = output.decode(errors="replace").strip().rpartition("\n")[2]
        if len(output) == OUTPUT_BYTES and last == output.decode(errors="replace").strip():
            raise RuntimeError(f"the last line of the command has more than {OUTPUT_BYTES} bytes")
        try:
            return json.loads(last) if last else None
        except ValueError:
            raise RuntimeError(f"the last line of the command is {last!r:.200}, expected JSON") from None


def release(pipe: int) -> None:
    """Let the launcher kill the command. A byte says it even where a forked process holds a copy of the pipe."""
    with suppress(BrokenPipeError):  # the launcher has ended
        os.write(pipe, b".")
    os.close(pipe)


def environment_of(address: str, key: str) -> dict[str, str]:
    """The environment variables of a command."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(OF_RANKS)}
    for name in ("NO_PROXY", "no_proxy"):  # a proxy of the machine must not stand between them
        kept[name] = ",".join(filter(None, ("127.0.0.1", kept.get(name))))
    return {**kept, "OPENAI_BASE_URL": address, "OPENAI_API_KEY": key}


async def send(pipe: asyncio.StreamWriter, content: bytes) -> None:
    """Write all, to a program that may not read it."""
    with suppress(BrokenPipeError, ConnectionResetError):
        pipe.write(content)
        await pipe.drain()
    pipe.close()


async def read_end(pipe: asyncio.StreamReader) -> bytes:
    """The last bytes of a stream that may be long. Where it is cancelled, those until then."""
    kept = b""
    with suppress(asyncio.CancelledError):
        while part := await pipe.read(OUTPUT_BYTES):
            kept = (kept + part)[-OUTPUT_BYTES:]
    return kept
