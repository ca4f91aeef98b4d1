"""For all tests: Ctrl-C works in the programs they start, also where the suite itself runs in the background."""

import signal

# A shell starts background jobs with SIGINT ignored; children inherit that, and could then not be interrupted.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
