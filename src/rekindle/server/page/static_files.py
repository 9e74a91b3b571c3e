"""The files of the page. Nothing in them comes from another host, and no text of a prompt becomes HTML."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from starlette.responses import Response

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


@cache
def page_files() -> dict[str, Response]:
    """All files by path; the page itself is at /page/index.html, and `greet` gives it to browsers at /."""
    found = {}
    for file in files(__package__).joinpath("static").iterdir():
        media_type = _TYPES[file.name.rsplit(".", 1)[1]]
        found[f"/page/{file.name}"] = Response(file.read_bytes(), headers=_HEADERS, media_type=media_type)
    return found
