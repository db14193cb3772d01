"""From errors to messages and exit codes: what every verb runs in."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable

from rtx_distributed.errors import RtxError, UsageError

INTERRUPTED = 130


def check_platform(platform: str) -> None:
    """Errors: ``UsageError`` elsewhere than on Linux."""
    if platform != "linux":
        raise UsageError(
            f"rtx-distributed runs on Linux only, and this is `{platform}`: use a Linux machine, "
            f"container or virtual machine"
        )


def run_verb(verb: Callable[[], int], *, debug: bool) -> int:
    """The exit code of ``verb``; an error becomes one message on stderr, with ``debug`` also its
    traceback."""
    try:
        check_platform(sys.platform)
        code = verb()
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("rtxd: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has gone. The interpreter's own flush at exit shall not complain.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except RtxError as error:
        _report(str(error), debug=debug)
        return error.exit_code
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        _report(what if debug else f"{what} (`--debug` shows where)", debug=debug)
        return 1
    return code


def wants_debug(args: list[str]) -> bool:
    """Whether a command line that may be wrong elsewhere asks for tracebacks."""
    wanted = os.environ.get("RTXD_DEBUG", "").lower() in {"1", "true", "yes", "on"}
    for arg in args:
        if arg == "--":
            break
        if arg in {"--debug", "--debug=true"}:
            wanted = True
    return wanted


def _report(message: str, *, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    print(f"rtxd: error: {message}", file=sys.stderr)
