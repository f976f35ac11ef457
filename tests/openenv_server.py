"""An OpenEnv server of the tests' own, on aiohttp: the published protocol, and faults that a test asks for.

tests/integrations/test_openenv_servers.py also runs OpenEnv's own package, which it installs into an environment.
"""

import asyncio
import json
import threading

from aiohttp import WSMsgType, web

TEXT_ACTION = {
    "type": "object", "title": "Say", "additionalProperties": False, "required": ["message"],
    "properties": {"metadata": {"type": "object", "title": "Metadata"}, "message": {"type": "string", "title": "M"}},
}  # fmt: skip
CALL_ACTION = {
    "type": "object", "title": "CallToolAction", "required": ["tool_name"],
    "properties": {
        "metadata": {"type": "object"}, "type": {"const": "call_tool", "type": "string"},
        "tool_name": {"type": "string"}, "arguments": {"type": "object"},
    },
}  # fmt: skip


class Served:
    """A server in a thread of its own, as a context manager.

    Args:
        game: Makes the environment of a session. It has `reset(**arguments)` and `step(action)`, which give
            (observation, reward, done), and `state`, a dict. What it raises is an error answer; `Refused` is one of
            validation. A `str` in place of the three is sent as it is.
        action: The JSON schema of its actions.
        most: Sessions at a time.
        pages: What GET answers in place of what OpenEnv answers: path -> (status, text).
    """

    def __init__(self, game, action=TEXT_ACTION, most=64, pages=None, name="Counting"):
        self.game, self.action, self.most, self.pages, self.name = game, action, most, pages or {}, name
        self.open, self.most_open, self.games, self.received, self.headers = 0, 0, [], [], []
        self.closed = threading.Event()  # set when no session is open any more
        self.loop = asyncio.new_event_loop()

    def __enter__(self):
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self.loop).result(60)
        return self

    def __exit__(self, *error):
        self.stop()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(60)

    def stop(self):
        """End it, and every connection."""
        asyncio.run_coroutine_threadsafe(self._stop(), self.loop).result(60)

    async def _start(self):
        app = web.Application()
        app.router.add_get("/ws", self._session)
        app.router.add_get("/{path}", self._page)
        self.sockets = set()
        self.runner = web.AppRunner(app, shutdown_timeout=0.0)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"

    async def _stop(self):
        for socket in list(self.sockets):
            socket._writer.transport.abort() if socket._writer else None
        await self.runner.cleanup()

    async def _page(self, request):
        self.headers.append(dict(request.headers))
        path = request.path
        if path in self.pages:
            status, text = self.pages[path]
            return web.Response(status=status, text=text)
        pages = {
            "/health": {"status": "healthy"}, "/metadata": {"name": self.name, "description": "Counts."},
            "/schema": {"action": self.action, "observation": {"type": "object"}, "state": {"type": "object"}},
        }  # fmt: skip
        return web.json_response(pages[path]) if path in pages else web.Response(status=404)

    async def _session(self, request):
        if "/ws" in self.pages:
            return web.Response(status=self.pages["/ws"][0])
        socket = web.WebSocketResponse(max_msg_size=0)
        await socket.prepare(request)
        self.headers.append(dict(request.headers))
        if self.open >= self.most:
            data = {"message": f"Server at capacity: {self.open}/{self.most} sessions active.",
                    "code": "CAPACITY_REACHED", "active_sessions": self.open, "max_sessions": self.most}  # fmt: skip
            await socket.send_json({"type": "error", "data": data})
            await socket.close()
            return socket
        self.open += 1
        self.closed.clear()
        self.most_open = max(self.most_open, self.open)
        self.sockets.add(socket)
        game = self.game()
        self.games.append(game)
        try:
            async for message in socket:
                if message.type != WSMsgType.TEXT or json.loads(message.data)["type"] == "close":
                    break
                await socket.send_str(await self._answer(game, json.loads(message.data)))
        except ConnectionError:
            pass
        finally:
            self.sockets.discard(socket)
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
            said = await asyncio.get_running_loop().run_in_executor(None, run)
        except Refused as error:
            errors = [{"loc": ["message"], "msg": str(error), "type": "x"}]
            said = {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": errors}
            return json.dumps({"type": "error", "data": said})
        except Exception as error:
            return json.dumps({"type": "error", "data": {"message": str(error), "code": "EXECUTION_ERROR"}})
        if isinstance(said, str):
            return said
        observation, reward, done = said
        answer = {"observation": observation, "reward": reward, "done": done}
        return json.dumps({"type": "observation", "data": answer})


class Refused(Exception):
    """An action that does not fit the schema."""


class Count:
    """Say the next number: 1 for the right one, nothing for a word; done at the third, or at the row's `goal`."""

    def __init__(self):
        self.count, self.goal, self.arguments = 0, 3, None

    def reset(self, **arguments):
        self.arguments, self.count = arguments, arguments.get("start", 0)
        self.goal = arguments.get("goal", 3)
        return {"text": f"Say {self.count + 1}."}, None, False

    def step(self, action):
        said = action["message"].strip()
        if not said:
            raise Refused("String should have at least 1 character")
        if not said.isdigit():
            return {"text": "Say a number."}, None, False
        self.count += 1
        return {"text": f"Say {self.count + 1}."}, int(said) == self.count, self.count >= self.goal

    @property
    def state(self):
        return {"episode_id": (self.arguments or {}).get("episode_id"), "step_count": self.count}


class Adds:
    """Tools: `add` gives 0.5 a call and ends the episode with a sum of 10; `fail` raises. Sessions keep their sums."""

    TOOLS = [
        {"name": "add", "description": "Add a number to the sum.",
         "input_schema": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}},
        {"name": "fail", "description": "Raise.", "input_schema": {"type": "object", "properties": {}}},
    ]  # fmt: skip

    def __init__(self):
        self.sum = 0

    def reset(self, **arguments):
        return {}, None, False

    def step(self, action):
        if action["type"] == "list_tools":
            return {"tools": self.TOOLS}, None, False
        name = action["tool_name"]
        if name == "fail":
            error = {"error_type": "execution_error", "message": "Error calling tool 'fail': no"}
            return {"tool_name": name, "result": None, "error": error}, None, False
        self.sum += action["arguments"]["n"]
        content = [{"type": "text", "text": f"The sum is {self.sum}."}]
        result = {"content": content, "is_error": False, "data": self.sum}
        return {"tool_name": name, "result": result, "error": None}, 0.5, self.sum >= 10

    @property
    def state(self):
        return {"sum": self.sum}
