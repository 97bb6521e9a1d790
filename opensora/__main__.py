"""`python -m opensora`, and `torchrun ... -m opensora`: see cli.py."""

from opensora.cli import main

if __name__ == "__main__":
    main()
