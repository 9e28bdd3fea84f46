"""`python -m specbench` is the same as `specbench`."""

import sys

from specbench.cli import main

if __name__ == "__main__":
    sys.exit(main())
