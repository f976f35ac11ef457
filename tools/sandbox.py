"""A folder per conversation in which the model writes and runs Python files: `tools_script: tools/sandbox.py`.

Protects against: programs that do not end, large files and outputs, file names that lead out of the folder. Does not
protect against what a program does: it runs as your user and may leave processes behind. Train in a container.
Reward functions can read `environments[i].folder`.
"""

import pathlib
import shutil
import subprocess
import sys
import tempfile


class Sandbox:
    seconds = 10  # that one program may take

    def reset(self, **row) -> None:
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="sandbox-"))

    def write_file(self, name: str, content: str) -> str:
        """Write a text file, such as main.py."""
        size = (self.folder / pathlib.Path(name).name).write_text(content)
        return f"{size} characters written"

    def run_python(self, name: str) -> str:
        """Run a Python file for a few seconds, and read the first 4000 bytes of what it prints."""
        limits = f'ulimit -f 1000; exec timeout -s KILL {self.seconds} "$0" "./$1"'
        command = ["bash", "-c", limits, sys.executable, pathlib.Path(name).name]
        with tempfile.TemporaryFile() as output:  # a pipe would stay open as long as any process of the program
            files = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
            code = subprocess.run(command, cwd=self.folder, env={}, timeout=self.seconds + 5, **files).returncode
            output.seek(0)
            return f"{output.read(4000).decode(errors='replace')}[exit code {code}]"

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


ENVIRONMENT = Sandbox
