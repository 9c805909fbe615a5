"""Lets the gate be set while serving: `GET` and `POST /v1/moet/gate`.

Given to vLLM as `--middleware moet_vllm.gate_control.GateControl`. The route lies under /v1, which
vLLM's API key guards.
"""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from moet_core.errors import ConfigError
from moet_core.gate import GateChange, GateSettings, changed

__all__ = ["PATH", "GateControl"]

PATH = "/v1/moet/gate"

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

router = APIRouter()


class GateControl:
    """Adds the route when the server starts.

    As a middleware it would run before vLLM's authentication; a route runs behind it.
    """

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand everything on."""
        if scope["type"] == "lifespan":
            scope["app"].include_router(router)
        await self._app(scope, receive, send)


@router.get(PATH)
async def show(request: Request) -> JSONResponse:
    """Tell how the gate is set."""
    return _answer(await _ask_ranks(request, "gate_settings"))


@router.post(PATH)
async def change(request: Request) -> JSONResponse:
    """Set `tau`, `gate_budget` or both, for all ranks between the same two steps."""
    try:
        wanted = msgspec.json.decode(await request.body(), type=GateChange)
    except msgspec.DecodeError as error:
        known = " and ".join(GateChange.__struct_fields__)
        return _refusal(400, f"The gate takes a JSON object with {known}: {error}.")
    now = await _ask_ranks(request, "gate_settings")
    if now:
        # A worker that raises would be taken for a broken one.
        try:
            changed(GateSettings(signal=now[0]["gate"], tau=now[0]["tau"]), wanted)
        except ConfigError as error:
            return _refusal(400, str(error))
        now = await _ask_ranks(request, "change_gate", msgspec.to_builtins(wanted))
    return _answer(now)


async def _ask_ranks(request: Request, method: str, *args: Any) -> list[dict[str, Any]]:
    """Call a method of all workers; return what those with a gate say."""
    found = await request.app.state.engine_client.collective_rpc(method, args=args)
    return [settings for settings in found if settings is not None]


def _answer(found: list[dict[str, Any]]) -> JSONResponse:
    if not found:
        return _refusal(404, "This server has no gate; start it with gate and tau set.")
    if any(settings != found[0] for settings in found):
        return _refusal(500, f"The ranks' gates differ: {found}. Restart the server.")
    return JSONResponse(found[0])


def _refusal(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "code": status}}, status)
