"""A folder of an origin behind a real nginx: plain files are enough."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from rekindle.remote.client import Origin
from rekindle.remote.connection import OriginFailed
from tests.docs.pages import ROOT
from tests.remote.conftest import Place
from tests.remote.places import cells_of, fetch_all, find

TOKEN = "correct-horse-battery-staple"


def server_block() -> str:
    """The configuration that the guide shows."""
    guide = (ROOT / "docs" / "guide" / "origin.md").read_text("utf-8")
    return guide.split("```nginx\n")[1].split("```")[0]


@pytest.fixture
def nginx(place: Place, tmp_path: Path) -> Iterator[str]:
    binary = shutil.which("nginx") or shutil.which("/usr/sbin/nginx")
    if binary is None:
        pytest.skip("nginx is not installed (apt-get install nginx)")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    block = server_block().replace("listen 8378;", f"listen 127.0.0.1:{port};").replace("TOKEN", TOKEN)
    block = block.replace("/srv/origin", str(place.folder))
    work = tmp_path / "nginx"
    work.mkdir()
    paths = "".join(
        f"{name}_temp_path {work}/{name};\n" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    config = work / "nginx.conf"
    config.write_text(
        # Its workers run as whoever runs the test: temporary folders are closed to others.
        f"user {_user()};\npid {work}/pid;\nerror_log {work}/error.log;\ndaemon off;\nmaster_process off;\n"
        f"events {{}}\nhttp {{\naccess_log off;\n{paths}{block}}}\n",
        "utf-8",
    )
    process = subprocess.Popen([binary, "-p", str(work), "-c", str(config), "-e", str(work / "error.log")])
    try:
        for _ in range(3000):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None, (work / "error.log").read_text("utf-8")
            time.sleep(0.01)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def test_a_client_reads_from_nginx(nginx: str, place: Place) -> None:
    origin = Origin(nginx, [place.key.public], secret=place.secret, token=TOKEN)
    found = find(origin)
    assert found is not None and found.chunks == 6 and found.levels == ("raw", "q4")
    forwards = fetch_all(origin, found, "q4")
    backwards = fetch_all(origin, found, "q4", cells_of(found)[::-1])
    assert set(forwards) == set(backwards) == set(cells_of(found))
    assert all(forwards[cell].keys.tobytes() == backwards[cell].keys.tobytes() for cell in forwards)
    assert len(origin.tokens(found)) == 700
    origin.close()
    with pytest.raises(OriginFailed, match="wants another token"):
        find(Origin(nginx, [place.key.public], secret=place.secret, token="another-token-of-somebody"))


def test_nginx_serves_ranges_and_nothing_else_with_the_configuration_of_the_guide(nginx: str, place: Place) -> None:
    blob = min(place.files.glob("*.kv"))
    (place.folder / ".parts" / "secret").write_text("half written")
    (place.folder / "by-chunk" / "notes.txt").write_text("no index")
    path, data = f"/contexts/{place.context}/{blob.name}", blob.read_bytes()
    with httpx.Client(base_url=nginx, headers={"Authorization": f"Bearer {TOKEN}"}, trust_env=False) as http:
        part = http.get(path, headers={"Range": "bytes=10-19"})
        assert part.status_code == 206 and part.content == data[10:20]
        assert (
            part.headers["content-range"] == f"bytes 10-19/{len(data)}" and "immutable" in part.headers["cache-control"]
        )
        assert http.get(path, headers={"If-None-Match": part.headers["etag"]}).status_code == 304
        assert http.get(f"/contexts/{place.context}/manifest").headers["cache-control"] == "no-cache"
        for other in ("/", "/.lock", "/.parts/secret", "/contexts/", "/by-chunk/", "/by-chunk/notes.txt"):
            assert http.get(other).status_code in (403, 404), other
        assert http.get(path, headers={"Authorization": "Bearer wrong"}).status_code == 401


def _user() -> str:
    import getpass

    return getpass.getuser()
