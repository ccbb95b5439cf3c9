"""`python -m allranks` is the same as `allranks`."""

from allranks.cli import main

if __name__ == "__main__":
    main()
