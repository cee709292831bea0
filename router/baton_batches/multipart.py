"""
An upload as it arrives: multipart/form-data, told apart piece by piece, with a file that is never held whole.

Small fields are kept; the file's bytes are handed on as they come. Which fields there must be, and in which
order they come, is not for here.
"""

from __future__ import annotations

import unicodedata

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from baton_api.errors import STRING_ABOVE_MAX_LENGTH, BodyTooLarge, InvalidRequest

FIELD_LIMIT = 1024
"""Bytes of a field that is no file."""
FIELDS_LIMIT = 32
NAME_LIMIT = 255
"""Characters of a file's name."""
UNNAMED = "upload"

# Characters that are seen as none, or change how those around them are seen.
_UNSEEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


class Form:
    """What was read so far."""

    def __init__(self, content_type: str, file_limit: int) -> None:
        """Raises InvalidRequest for another type of body."""
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            raise InvalidRequest("The body must be multipart/form-data, with a boundary in its Content-Type.")
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        """None as long as no file has begun."""
        self.pieces: list[bytes] = []
        """Of the file, not yet taken."""
        self.size = 0
        """Of the file, as far as it came."""
        self.complete = False
        self._file_limit = file_limit
        self._header = bytearray()
        self._value = bytearray()
        self._headers: dict[bytes, bytes] = {}
        self._name = ""
        self._text = bytearray()
        self._is_file = False
        try:
            self._parser = MultipartParser(
                options[b"boundary"],
                {
                    "on_part_begin": self._part_begins,
                    "on_header_field": self._header_goes_on,
                    "on_header_value": self._value_goes_on,
                    "on_header_end": self._header_ends,
                    "on_headers_finished": self._headers_end,
                    "on_part_data": self._data,
                    "on_part_end": self._part_ends,
                    "on_end": self._ends,
                },
            )
        except FormParserError as error:
            raise InvalidRequest("The boundary in the Content-Type is too long.") from error

    def feed(self, data: bytes) -> None:
        """Raises InvalidRequest, and BodyTooLarge if the file is."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise InvalidRequest(
                "The body is not the multipart/form-data that its Content-Type says."
            ) from error

    def take(self) -> bytes:
        """What came of the file since the last time."""
        taken = b"".join(self.pieces)
        self.pieces.clear()
        return taken

    # --- What the parser calls ---

    def _part_begins(self) -> None:
        self._headers = {}
        self._text.clear()

    def _header_goes_on(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _value_goes_on(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_ends(self) -> None:
        self._headers[bytes(self._header).lower()] = bytes(self._value)
        self._header.clear()
        self._value.clear()

    def _headers_end(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition"))
        self._name = options.get(b"name", b"").decode(errors="replace")
        given = options.get(b"filename")
        self._is_file = self._name == "file" and given is not None
        if not self._is_file:
            if len(self.fields) >= FIELDS_LIMIT:
                raise InvalidRequest(f"The form has more than {FIELDS_LIMIT} fields.")
            return
        if self.filename is not None:
            raise InvalidRequest("The form has more than one file; send each by itself.", param="file")
        self.filename = sanitised((given or b"").decode(errors="replace"))

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self.size += end - start
            if self.size > self._file_limit:
                raise BodyTooLarge(self._file_limit)
            self.pieces.append(data[start:end])
            return
        self._text += data[start:end]
        if len(self._text) > FIELD_LIMIT:
            raise InvalidRequest(
                f"The field is over the limit of {FIELD_LIMIT} bytes.",
                param=self._name[:100],
                code=STRING_ABOVE_MAX_LENGTH,
            )

    def _part_ends(self) -> None:
        if not self._is_file:
            self.fields[self._name] = self._text.decode(errors="replace")

    def _ends(self) -> None:
        self.complete = True


def sanitised(name: str) -> str:
    """
    What is shown of a name that a client gave; nothing is ever stored under it.

    >>> sanitised("../../etc/passwd"), sanitised("C:\\\\in.jsonl"), sanitised("a\\x00\\u202eb.txt")
    ('passwd', 'in.jsonl', 'ab.txt')
    """
    last = name.replace("\\", "/").rpartition("/")[2]
    seen = "".join(letter for letter in last if unicodedata.category(letter) not in _UNSEEN).strip()
    return UNNAMED if seen in ("", ".", "..") else seen[:NAME_LIMIT]
