"""``python -m areal.cli``: the same as the console script ``areal``."""

from areal.cli import main

if __name__ == "__main__":
    main()
