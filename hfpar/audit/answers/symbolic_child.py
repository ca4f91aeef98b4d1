"""The process that asks math-verify: a line with two expressions comes in, a line with the verdict goes out.

Run as a script, by its path, so that it loads nothing of hfpar and starts in half a second.
"""

from __future__ import annotations

import json
import resource
import signal
import sys

MEMORY_BYTES = 2 * 2**30


def main() -> None:
    """Answer until the input ends, which it does with the parent."""
    sys.path.pop(0)  # modules beside this file aren't meant by anyone's import
    from math_verify import LatexExtractionConfig, parse, verify

    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = MEMORY_BYTES if most == resource.RLIM_INFINITY else min(MEMORY_BYTES, most)
    resource.setrlimit(resource.RLIMIT_AS, (limit, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    print("ready", flush=True)  # noqa: T201
    for line in sys.stdin:
        request = json.loads(line)
        # Ends this process, should the parent be gone when the time is up.
        signal.setitimer(signal.ITIMER_REAL, request["seconds"] + 1)
        try:
            left, right = (
                parse(f"${request[key]}$", [LatexExtractionConfig()], parsing_timeout=None)  # type: ignore[arg-type]
                for key in ("left", "right")
            )
            verdict = bool(left and right) and verify(left, right, timeout_seconds=None)
        except Exception:  # whatever they raise on hostile input, it's no verdict
            verdict = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        print("true" if verdict else "false", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
