"""``python -m autotune``."""

import sys

try:
    from autotune.cli import main

    code = main()
except KeyboardInterrupt:  # So early that even `main` was not there yet.
    print("autotune: interrupted", file=sys.stderr)
    code = 130
sys.exit(code)
