"""Files to read, built by hand: PDF, Word, e-mail."""

from __future__ import annotations

import base64
import io
import zipfile
from collections.abc import Sequence


def pdf(pages: Sequence[Sequence[str]], *, title: str = "", encrypted: bool = False) -> bytes:
    """A PDF of these lines of text, a list for each page; a page without lines shows a grey box."""
    objects = [b"<< /Type /Catalog /Pages 2 0 R >>", b"", b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"]
    kids = []
    for lines in pages:
        shown = "".join(f"1 0 0 1 50 {750 - 14 * at} Tm ({line}) Tj\n" for at, line in enumerate(lines))
        content = f"BT /F1 10 Tf\n{shown}ET" if lines else "0.5 g 50 50 300 300 re f"
        objects.append(b"<< /Length %d >>\nstream\n%s\nendstream" % (len(content), content.encode("latin-1")))
        objects.append(
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents %d 0 R"
            b" /Resources << /Font << /F1 3 0 R >> >> >>" % len(objects)
        )
        kids.append(b"%d 0 R" % len(objects))
    objects[1] = b"<< /Type /Pages /Count %d /Kids [%s] >>" % (len(kids), b" ".join(kids))
    trailer = b"/Root 1 0 R"
    if title:
        objects.append(b"<< /Title (%s) >>" % title.encode("latin-1"))
        trailer += b" /Info %d 0 R" % len(objects)
    if encrypted:  # no password fits what stands here for the hashes of one
        objects.append(b"<< /Filter /Standard /V 1 /R 2 /P -4 /O <%s> /U <%s> >>" % (b"ab" * 32, b"cd" * 32))
        trailer += b" /Encrypt %d 0 R /ID [<00> <00>]" % len(objects)
    return _with_table(objects, trailer)


def _with_table(objects: Sequence[bytes], trailer: bytes) -> bytes:
    result, offsets = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        offsets.append(len(result))
        result += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    count = len(objects) + 1
    return result + (
        b"xref\n0 %d\n0000000000 65535 f \n%s" % (count, table)
        + b"trailer\n<< /Size %d %s >>\nstartxref\n%d\n%%%%EOF\n" % (count, trailer, len(result))
    )


def repacked(package: bytes, member: str, content: bytes) -> bytes:
    """The package with another content of one member."""
    result = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(package)) as old, zipfile.ZipFile(result, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, content if name == member else old.read(name))
    return result.getvalue()


def understated(package: bytes, member: str, stated: int) -> bytes:
    """The package, of which one member says that it is `stated` bytes long when unpacked."""
    result = bytearray(package)
    for signature, name_at, size_at in ((b"PK\x03\x04", 30, 22), (b"PK\x01\x02", 46, 24)):
        at = -1
        while (at := result.find(signature, at + 1)) >= 0:
            if result[at + name_at :].startswith(member.encode()):
                result[at + size_at : at + size_at + 4] = stated.to_bytes(4, "little")
    return bytes(result)


def mail(*parts: bytes, kind: str = "mixed", headers: str = "") -> bytes:
    """A message of these parts, each with its own headers."""
    head = f"From: Ann <ann@example.org>\nTo: Bob <bob@example.org>\nDate: Mon, 1 Jan 2024 10:00:00 +0000\n{headers}"
    body = b"".join(b"--XX\n%s\n" % part for part in parts)
    return (
        head.encode()
        + b'MIME-Version: 1.0\nContent-Type: multipart/%s; boundary="XX"\n\n' % kind.encode()
        + (body + b"--XX--\n")
    )


def attached(name: str, content: bytes) -> bytes:
    """A part that is an attachment."""
    head = f'Content-Type: application/octet-stream; name="{name}"\nContent-Transfer-Encoding: base64\n'
    return f'{head}Content-Disposition: attachment; filename="{name}"\n\n'.encode() + base64.encodebytes(content)
