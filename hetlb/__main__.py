"""`python -m hetlb` is the same command as `hetlb`."""

from hetlb.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
