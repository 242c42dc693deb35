"""`python -m measureflow` is the command line."""

from measureflow.cli import main

if __name__ == "__main__":
    main()
