"""`python -m moet_cli` is `moet`."""

import sys

from moet_cli.main import main

if __name__ == "__main__":
    sys.exit(main())
