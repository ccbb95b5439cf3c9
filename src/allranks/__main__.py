"""`python -m allranks` is the same as `allranks`."""

from allranks.cli.main import main

if __name__ == "__main__":
    main()
