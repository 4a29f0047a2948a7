"""A stream that stands for a terminal."""

import io


class Terminal(io.StringIO):
    """Text that a program prints on a terminal."""

    def isatty(self) -> bool:
        return True
