"""An agent that works on a task folder of Harbor, in the task's own sandbox. It needs Python alone, and no package.

    environment: harbor
    agent_command: python3 tools/agents/bash_on_a_task.py
    harbor_agent_folders: [tools/agents]

It reads the instruction, lets the policy type commands until it answers, and returns nothing: the tests judge.
"""

import json
import os
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request

BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command in bash. Each call is a new shell, in the folder where the last one ended.",
        "parameters": {
            "type": "object",
            "properties": {
                "command": {"type": "string", "description": "One line or several. It cannot ask for input."}
            },
            "required": ["command"],
        },
    },
}
SECONDS = 10  # of a command
SHOWN = 4000  # characters of what it prints


def ask(messages: list) -> dict | None:
    """The policy's answer, a message. None where the rollout is over, or its context full."""
    body = json.dumps({"model": "policy", "messages": messages, "tools": [BASH]}).encode()
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body, headers)
    try:
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)["choices"][0]["message"]
    except urllib.error.HTTPError as error:
        if error.code in (400, 429):
            return None
        raise


def run(call: dict, folder: dict) -> str:
    """What the policy reads of a call, which begins in `folder["at"]` and leaves there where it ends."""
    while not os.path.isdir(folder["at"]):  # it was deleted
        folder["at"] = os.path.dirname(folder["at"])
    with tempfile.NamedTemporaryFile("r") as left:
        try:
            command = json.loads(call["function"]["arguments"])["command"]
            done = subprocess.run(
                ["bash", "-c", f"trap 'pwd > {left.name}' EXIT\n{command}"],
                cwd=folder["at"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=SECONDS,
            )
        except (KeyError, TypeError, ValueError, OSError) as error:
            return f"Error: {error}"
        except subprocess.TimeoutExpired as stopped:
            text = (stopped.stdout or b"").decode(errors="replace")[:SHOWN].rstrip()
            return f"{text}\n[stopped after {SECONDS} seconds]".lstrip()
        folder["at"] = left.read().rstrip("\n") or folder["at"]
    text = done.stdout.decode(errors="replace")[:SHOWN].rstrip()
    return text + (f"\n[exit code {done.returncode}]" if done.returncode else "") or "[no output]"


def main() -> None:
    """Work on the task of the row."""
    row = json.load(sys.stdin)
    folder = {"at": os.getcwd()}
    messages = [{"role": "system", "content": "Use bash."}, {"role": "user", "content": row["instruction"]}]
    while True:
        message = ask(messages)
        if not message or not message.get("tool_calls"):
            return
        messages.append(message)
        for call in message["tool_calls"]:
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": run(call, folder)})


if __name__ == "__main__":
    main()
