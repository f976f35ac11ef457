"""An OpenEnv server of the tests' own, on aiohttp. It answers as openenv 0.10, or as a test wants it to fail."""

import asyncio
import contextlib
import json
import threading

from aiohttp import web

from mt_grpo.base.event_loop import background_loop

TEXT = {"properties": {"metadata": {"type": "object"}, "message": {"type": "string"}}, "required": ["message"]}
CALLS = {"properties": {"metadata": {}, "type": {"const": "call_tool"}, "tool_name": {}, "arguments": {}}}


class Served:
    """A server in a thread of its own, as a context manager.

    Args:
        game: Makes the environment of a session. It has `reset(**arguments)` and `step(action)`, which return
            (observation, reward, done), and `state`, a dict. What it raises is an error answer; `Refused` is one of
            validation. A `str` instead of the three is sent as it is; None ends the connection.
        action: The JSON schema of its actions.
        most: Sessions at a time.
    """

    def __init__(self, game, action=TEXT, most=64, name="Counting"):
        self.game, self.action, self.most, self.name = game, action, most, name
        self.open, self.most_open, self.games, self.received = 0, 0, [], []
        self.closed = threading.Event()  # set when no session is open any more

    def __enter__(self):
        asyncio.run_coroutine_threadsafe(self._start(), background_loop("test-openenv")).result(60)
        return self

    def __exit__(self, *error):
        asyncio.run_coroutine_threadsafe(self.runner.cleanup(), background_loop("test-openenv")).result(60)

    async def _start(self):
        app = web.Application()
        app.add_routes([web.get("/ws", self._session), web.get("/{page}", self._page)])
        self.runner = web.AppRunner(app, shutdown_timeout=0.0)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"

    async def _page(self, request):
        pages = {"metadata": {"name": self.name}, "schema": {"action": self.action}}
        return web.json_response(pages[request.path[1:]])

    async def _session(self, request):
        socket = web.WebSocketResponse(max_msg_size=0)
        await socket.prepare(request)
        if self.open >= self.most:
            data = {"message": f"Server at capacity: {self.open}/{self.most}.", "code": "CAPACITY_REACHED"}
            await socket.send_json({"type": "error", "data": data})
            await socket.close()
            return socket
        self.open += 1
        self.closed.clear()
        self.most_open = max(self.most_open, self.open)
        self.games.append(game := self.game())
        with contextlib.suppress(ConnectionError):
            async for message in socket:
                if (answer := await self._answer(game, message.json())) is None:
                    break
                await socket.send_str(answer)
        self.open -= 1
        if not self.open:
            self.closed.set()
        await socket.close()
        return socket

    async def _answer(self, game, message):
        kind, data = message["type"], message.get("data", {})
        self.received.append((kind, data))
        try:
            if kind == "state":
                return json.dumps({"type": "state", "data": game.state})
            run = (lambda: game.reset(**data)) if kind == "reset" else (lambda: game.step(data))
            answer = await asyncio.get_running_loop().run_in_executor(None, run)
        except Exception as error:
            data = {"message": str(error), "code": "EXECUTION_ERROR"}
            if isinstance(error, Refused):
                errors = [{"loc": ["message"], "msg": str(error)}]
                data = {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": errors}
            return json.dumps({"type": "error", "data": data})
        if answer is None or isinstance(answer, str):
            return answer
        data = {"observation": {**answer[0], "metadata": {}}, "reward": answer[1], "done": answer[2]}
        return json.dumps({"type": "observation", "data": data})


class Refused(Exception):
    """An action that does not fit the schema."""


class Count:
    """Say the next number: 1 for the right one, nothing for a word. Done at the third, or at `goal`."""

    state = property(lambda self: {"step_count": self.count})

    def reset(self, start=0, goal=3, **arguments):
        self.count, self.goal, self.arguments = start, goal, arguments
        return {"text": f"Say {self.count + 1}."}, None, False

    def step(self, action):
        said = action["message"].strip()
        if not said:
            raise Refused("String should have at least 1 character")
        if not said.isdigit():
            return {"text": "Say a number."}, None, False
        self.count += 1
        return {"text": f"Say {self.count + 1}."}, int(said) == self.count, self.count >= self.goal


class Adds:
    """The tool `add` gives 0.5 a call, raises for 0, and ends the episode with a sum of 10."""

    TOOL = {"name": "add", "description": "Add to the sum.", "input_schema": {"type": "object", "required": ["n"],
            "properties": {"n": {"type": "integer"}}}}  # fmt: skip
    sum = 0
    state = property(lambda self: {"sum": self.sum})

    def reset(self, **arguments):
        return {}, None, False

    def step(self, action):
        if action["type"] == "list_tools":
            return {"tools": [self.TOOL]}, None, False
        if action["arguments"]["n"] == 0:
            return {"tool_name": "add", "result": None, "error": {"message": "it is nothing"}}, None, False
        self.sum += action["arguments"]["n"]
        content = [{"type": "text", "text": f"The sum is {self.sum}."}, {"type": "image", "data": "eA=="}]
        result = {"content": content[: 1 + (self.sum == 9)], "is_error": False}
        return {"tool_name": "add", "result": result, "error": None}, 0.5, self.sum >= 10
