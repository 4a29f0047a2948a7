"""The page of `bert serve` and its requests over HTTP.

A browser also carries the requests of other pages. So a request must name this machine as its host, which a page that
has pointed its own name at this machine cannot, and must not come from another page. A page for other machines answers
only requests with the token of its printed address. No answer has a path.
"""

import asyncio
import ipaddress
import json
import re
import secrets
import socket
import traceback
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bert_cli.errors import BertError, ConfigError, needs_extra
from bert_cli.files import JSONObject
from bert_cli.processes import print_error, print_line
from bert_cli.tasks.use.requests import Call

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
    from starlette.requests import Request
    from starlette.responses import FileResponse, HTMLResponse, JSONResponse, Response
    from starlette.routing import Route
except ImportError:
    raise ConfigError("bert serve", needs_extra("serve")) from None

PAGE = Path(__file__).with_name("page.html")
READ = ("about", "file")  # requests without a body
MOST_BYTES = 100_000  # of a request
LOOPBACK = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d+)?")
POLICY = (
    "default-src 'nonce-{}'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)


def run(host: str | None, port: int, opening: Callable[[], Mapping[str, Call]]) -> None:
    """Serve what `opening` returns until Ctrl-C. Raises ConfigError if the port is taken."""
    with listen(host, port) as listener:
        host, port = listener.getsockname()[:2]
        in_address = f"[{host}]" if ":" in host else host
        # The other addresses of this machine need the token.
        token = None
        query = ""
        if not LOOPBACK.fullmatch(in_address):
            token = secrets.token_urlsafe(16)
            query = f"?token={token}"
        app = build_app(opening(), token)
        # A browser cannot open 0.0.0.0: the name of the machine stands for all of its addresses.
        shown = in_address
        if ipaddress.ip_address(host).is_unspecified:
            shown = socket.gethostname()
        print_line(f"open http://{shown}:{port}/{query} and end with Ctrl-C")
        if token:
            problem = "everyone on the network who has this address can use the page"
            print_error(f"warning: host ({host}): {problem}, and nothing is encrypted")
        # The addresses of requests have the token.
        options: dict[str, Any] = {"log_level": "warning", "access_log": False, "ws": "none"}
        config = uvicorn.Config(app, **options, timeout_graceful_shutdown=1)
        uvicorn.Server(config).run(sockets=[listener])


def listen(host: str | None, port: int) -> socket.socket:
    """Return a socket that listens. Raises ConfigError for a port that is taken and an address of another machine."""
    try:
        family, *_, name = socket.getaddrinfo(host or "127.0.0.1", port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(name[:2], family=family)
    except (OSError, UnicodeError) as error:
        where = f"port ({port})"
        if host is not None:
            where = f"host ({host}), {where}"
        remedy = "choose another, such as --port 0 for a free port"
        problem = str(getattr(error, "strerror", "is not a host name"))
        raise ConfigError(where, problem.partition(" (")[0], remedy) from None


def build_app(calls: Mapping[str, Call], token: str | None) -> Starlette:
    """Return the application: the page, `GET /api/about`, and `POST /api/NAME` for each other call."""
    worker = ThreadPoolExecutor(1)  # one answer at a time: each uses all cores
    nonce = secrets.token_urlsafe(16)  # of the script and the style of the page; no others are used
    page = PAGE.read_text(encoding="utf-8").replace("NONCE", nonce)
    headers = {"Content-Security-Policy": POLICY.format(nonce), "Referrer-Policy": "no-referrer"}
    headers |= {"X-Content-Type-Options": "nosniff", "Cross-Origin-Resource-Policy": "same-origin"}

    async def check(request: Request, call_next: RequestResponseEndpoint) -> Response:
        status, problem = refusal(request, token)
        if problem:
            response = refused(status, problem)
        else:
            response = await call_next(request)
        response.headers.update(headers)
        return response

    def endpoint(call: Call) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            sent = await sent_by(request)
            answering = asyncio.get_running_loop().run_in_executor(worker, call, sent)
            try:
                row: Any = await answering
                if isinstance(row, tuple):
                    return sent_file(*row)
                return JSONResponse(row)
            except ConfigError as mistake:
                return refused(400, str(mistake))
            except Exception as failure:  # its message may have a path
                # A traceback is for a defect of the tool alone.
                if isinstance(failure, BertError):
                    print_error(str(failure))
                else:
                    print_error(traceback.format_exc())
                return refused(500, "the answer failed: see what bert serve printed")

        return answer

    routes = [Route("/", lambda request: HTMLResponse(page))]
    for name, call in calls.items():
        way = "GET" if name in READ else "POST"
        routes.append(Route(f"/api/{name}", endpoint(call), methods=[way]))
    return Starlette(
        routes=routes,
        middleware=[Middleware(BaseHTTPMiddleware, dispatch=check)],
        exception_handlers={HTTPException: lambda _, e: refused(e.status_code, e.detail)},
    )


def sent_file(path: Path, type_of_file: str | None) -> Response:
    """Return a file to read, by its media type, and others to save."""
    place = "inline" if type_of_file else "attachment"
    return FileResponse(
        path, media_type=type_of_file, filename=path.name, content_disposition_type=place
    )


def refused(status: int, problem: str) -> Response:
    """Return an answer without a result."""
    return JSONResponse({"error": problem}, status)


def refusal(request: Request, token: str | None) -> tuple[int, str]:
    """Return the status and the problem of a request that did not come from the page; "" for one that did.

    Another page that has pointed its name at this machine does not know the token.
    """
    remedy = "open the address that bert serve printed"
    host = request.headers.get("host", "")
    origin = request.headers.get("origin")
    if token is None and not LOOPBACK.fullmatch(host):
        return 421, f"this page is not at the host {host!r}: {remedy}"
    if origin is not None and origin.partition("://")[2] != host:
        return 403, f"the page {origin!r} may not ask: {remedy}"
    token_sent = request.query_params.get("token", "")
    if token and not secrets.compare_digest(token_sent.encode(), token.encode()):
        return 401, f"the token is missing or wrong: {remedy}"
    return 0, ""


async def sent_by(request: Request) -> JSONObject:
    """Return the JSON object of a POST request, by default an empty one, or the query of a GET request.

    Raises HTTPException for what is no JSON object.
    """
    body = b""
    async for part in request.stream():  # to its end: a client that still sends reads no answer
        if len(body) <= MOST_BYTES:
            body += part
    if len(body) > MOST_BYTES:
        raise HTTPException(413, f"the request is too large: send at most {MOST_BYTES:,} bytes")
    try:
        sent = json.loads(body or b"{}")
    except (ValueError, RecursionError):
        sent = None
    if not isinstance(sent, dict):
        raise HTTPException(400, "the request is not a JSON object: send one, in UTF-8")
    if request.method != "POST":
        return dict(request.query_params)
    return sent
