"""The script's stderr looks like a terminal."""
import io
import sys


class Terminal(io.TextIOWrapper):
    def isatty(self):
        return True


sys.stderr = Terminal(sys.stderr.detach(), 'utf-8', line_buffering=True)
