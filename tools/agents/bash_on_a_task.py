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


def ask(messages: list) -> dict:
    """The policy's answer, a message. Raises `OSError` where the rollout is over."""
    body = json.dumps({"model": "policy", "messages": messages, "tools": [BASH]}).encode()
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body, headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]


def run(call: dict) -> str:
    """What the policy reads of a call."""
    try:
        command = json.loads(call["function"]["arguments"])["command"]
        done = subprocess.run(
            ["bash", "-c", command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            timeout=SECONDS,
        )  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        return f"Error: {error}"
    except subprocess.TimeoutExpired:
        return f"[stopped after {SECONDS} seconds]"
    text = done.stdout.decode(errors="replace")[:SHOWN].rstrip()
    return text + (f"\n[exit code {done.returncode}]" if done.returncode else "") or "[no output]"


def main() -> None:
    """Work on the task of the row."""
    row = json.load(sys.stdin)
    messages = [{"role": "system", "content": "Use bash."}, {"role": "user", "content": row["instruction"]}]
    while True:
        message = ask(messages)
        messages.append(message)
        if not message.get("tool_calls"):
            return
        for call in message["tool_calls"]:
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": run(call)})


if __name__ == "__main__":
    main()
